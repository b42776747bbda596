"""What `paceline plan` needs to know of a training step: here that of ddp_digits.py.

paceline plan examples/digits_step.py:step -n 2
"""

import torch
from ddp_digits import build_model
from torch import nn


def step():
    return {
        "module": build_model(),
        "inputs": torch.zeros(32, 1, 8, 8),
        "target": torch.zeros(32, dtype=torch.long),
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    }
