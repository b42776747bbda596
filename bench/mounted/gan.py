"""A generative adversarial network on grey images of a microscope, each a NumPy file of bytes."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from training import train


class Images(torch.utils.data.Dataset):
    def __init__(self, root):
        self.paths = sorted(root.rglob("*.npy"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        pixels = np.load(self.paths[number])  # (256, 256)
        return torch.from_numpy(pixels[::4, ::4].astype(np.float32))[None] / 127.5 - 1


def grow(inputs, outputs):
    return [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]


def shrink(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU(0.2)]


generator = nn.Sequential(
    nn.ConvTranspose2d(32, 128, 8),
    *grow(128, 64),
    *grow(64, 32),
    nn.ConvTranspose2d(32, 1, 4, 2, 1),
    nn.Tanh(),
)
critic = nn.Sequential(
    *shrink(1, 32), *shrink(32, 64), *shrink(64, 128), nn.Flatten(), nn.Linear(128 * 64, 1)
)
optimizers = [torch.optim.Adam(net.parameters(), 2e-4) for net in (generator, critic)]
judge = nn.BCEWithLogitsLoss()


def step(real):
    made = generator(torch.randn(len(real), 32, 1, 1))
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    optimizers[1].zero_grad()
    loss = judge(critic(real), ones) + judge(critic(made.detach()), zeros)
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    judge(critic(made), ones).backward()
    optimizers[0].step()
    return loss.item()


train(Images(Path(sys.argv[1])), step, batch=16, epochs=int(sys.argv[2]))
