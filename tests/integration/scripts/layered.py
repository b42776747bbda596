"""Trains a small model of named layers and writes a digest of its weights: layered.py OUT STEPS S.

It computes for S seconds afterwards: counters of the node need some time.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 32


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, 10)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


def main(out, steps, seconds):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    inputs, target = torch.randn(64, WIDTH), torch.randint(0, 10, (64,))
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    # What sampling leaves behind.
    hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    left = {"hooks": [hook for hook in hooks if hook is not None]}
    result = {"digest": digest.hexdigest(), "parameters": sum(map(torch.numel, model.parameters()))}
    Path(f"{out}-{dist.get_rank()}.json").write_text(json.dumps({**result, **left}))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.mm(inputs.T, inputs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
