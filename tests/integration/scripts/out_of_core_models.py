"""The model of the tests of training out of core: its tensors are of 1 MiB."""

import torch
from torch import nn

WIDTH, ROWS = 256, 1024


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.second(torch.dropout(torch.relu(self.first(x)), 0.1, True)))


def residuals(count=4):
    """Return a network of residual blocks."""
    return nn.Sequential(*(Residual() for _ in range(count)))


def rows():
    """Return a batch."""
    return torch.randn(ROWS, WIDTH)
