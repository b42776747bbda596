"""Trains on process groups that a DistributedDataParallel outlives, as it does in most scripts.

A callback that is still to come when a group ends is the rule here: another thread gets the GIL
only where the main thread lets go of it.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

GROUPS, STEPS = 10, 3


def train():
    group = dist.new_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2), process_group=group)
    for _ in range(STEPS):
        model(torch.ones(4, 8)).sum().backward()
    dist.destroy_process_group(group)


def main():
    dist.init_process_group("gloo")
    sys.setswitchinterval(1000)
    for _ in range(GROUPS):
        train()
    dist.destroy_process_group()
    print("trained")


main()
