"""Trains a net with BatchNorm on ranks; one is slowed in some steps, and says by how much."""

import argparse
import json
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline.training import prepare


class Slowness:
    """Delays one rank in one place; the step is counted by whoever trains."""

    def __init__(self, options, rank):
        self.options = options
        self.mine = options.rank == rank
        self.step = 0
        self.measured_s = []

    def apply(self, place):
        options = self.options
        if (
            not self.mine
            or place != options.place
            or not options.first <= self.step <= options.last
        ):
            return
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        if place == "data":
            threading.Event().wait(options.ms / 1e3)
        else:  # so much computing, however long a busy node takes for it
            while time.thread_time() - cpu_begin < options.ms / 1e3:
                pass
        self.measured_s.append(time.perf_counter() - begin)


class Noise(Dataset):
    def __init__(self, slowness, count):
        self.slowness = slowness
        self.images = torch.randn(count, 1, 16, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitems__(self, indices):
        self.slowness.apply("data")
        return [(self.images[i], i % 10) for i in indices]


class Net(nn.Module):
    def __init__(self, slowness):
        super().__init__()
        self.slowness = slowness
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def forward(self, images):
        self.slowness.apply("compute")
        return self.layers(images)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rank", type=int, default=-1, help="who is slowed; -1 is nobody")
    parser.add_argument("--place", choices=("data", "compute"), default="data")
    parser.add_argument("--ms", type=float, default=25.0)
    parser.add_argument("--first", type=int, default=40)
    parser.add_argument("--last", type=int, default=100)
    parser.add_argument("--engine", help="of prepare; default: DistributedDataParallel, by hand")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    slowness = Slowness(options, dist.get_rank())
    torch.manual_seed(0)
    loader = DataLoader(Noise(slowness, options.steps * options.batch), batch_size=options.batch)
    model = Net(slowness)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if options.engine:
        model, optimizer = prepare(model, optimizer, engine=options.engine)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        slowness.step += 1
    if slowness.mine:
        middle_s = sorted(slowness.measured_s)[len(slowness.measured_s) // 2]
        print(json.dumps({"injected_ms": 1e3 * middle_s}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
