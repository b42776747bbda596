"""Four steps by `prepare` on the engine that is named."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from paceline.training import prepare


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = prepare(model, optimizer, engine=sys.argv[1])
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
