"""An LSTM that predicts disruptions from sensors' records, each a NumPy file."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from training import train


class Records(torch.utils.data.Dataset):
    def __init__(self, root):
        self.paths = sorted(root.rglob("*.npy"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        record = np.load(self.paths[number])  # (steps, channels)
        return torch.from_numpy(record[:, :-1]), torch.from_numpy(record[:, -1])


class Predictor(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.cells = nn.LSTM(channels, 128, num_layers=2, batch_first=True)
        self.out = nn.Linear(128, 1)

    def forward(self, inputs):
        return self.out(self.cells(inputs)[0]).squeeze(-1)


model = Predictor(15)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)


def step(batch):
    inputs, targets = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


train(Records(Path(sys.argv[1])), step, batch=16, epochs=int(sys.argv[2]))
