"""A small DDP training that can go wrong when told to; prints one line of JSON."""

import argparse
import json
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Of this script's own module: workers that are spawned must be able to import it."""

    def __init__(self, count, fails):
        self.count, self.fails = count, fails

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rank, at, how = self.fails
        if index == int(at) and os.environ.get("RANK", "0") == rank:
            fail(how)
        return torch.full((16,), float(index % 7)), torch.tensor(float(index % 7) ** 2)


def fail(how):
    if how == "raise":
        raise ValueError("the loss is not finite")
    if how == "exit":
        sys.exit(3)
    if how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    os.kill(os.getpid(), getattr(signal, how))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context")
    parser.add_argument("--sharing", default="file_descriptor", help="of tensors, by workers")
    parser.add_argument("--deaf", action="store_true", help="do not listen to SIGTERM")
    parser.add_argument("--fail", nargs=3, metavar=("RANK", "STEP", "HOW"), default=("-1", "0", ""))
    parser.add_argument(
        "--fail-at-sample", nargs=3, metavar=("RANK", "INDEX", "HOW"), default=("-1", "0", "")
    )
    parser.add_argument("--longer-on-rank-1", action="store_true", help="a tensor of the last step")
    options = parser.parse_args()
    if options.deaf:
        signal.signal(signal.SIGTERM, lambda *_: None)
    torch.multiprocessing.set_sharing_strategy(options.sharing)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(
        Squares(8 * options.steps, options.fail_at_sample),
        batch_size=8,
        num_workers=options.workers,
        multiprocessing_context=options.context,
    )
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rank, step = int(options.fail[0]), 0

    def in_backward(*_):
        if rank == dist.get_rank() and step == int(options.fail[1]):
            fail(options.fail[2])

    model.module[2].register_full_backward_hook(in_backward)
    for inputs, target in loader:
        optimizer.zero_grad()
        ((model(inputs).squeeze(1) - target) ** 2).mean().backward()
        optimizer.step()
        step += 1
    if options.longer_on_rank_1:
        dist.all_reduce(torch.ones(1000 + 500 * dist.get_rank()))
    if dist.get_rank() == 0:
        print(json.dumps({"backend": dist.get_backend(), "main": Squares.__module__}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
