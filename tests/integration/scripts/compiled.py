"""Trains a compiled model; prints the losses, exactly."""

import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1))
compiled = torch.compile(model, backend=sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, losses = torch.randn(8, 16), []
for _ in range(5):
    optimizer.zero_grad()
    loss = compiled(inputs).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
print(json.dumps({"losses": losses}))
