"""One rank of a training of `predict_unseen.py`: prints its step times and its peak memory.

    python bench/unseen_ranks.py MODEL RANK RANKS THREADS STORE SECONDS

Blocks of steps that reduce gradients alternate with blocks of steps in `no_sync`: the difference is
the communication that is exposed. In a third kind of blocks the ranks reduce one number after the
backward pass instead of their gradients: what of that difference is not due to bytes. The first
step of a block does not count: DDP broadcasts buffers before the step after one that reduced. Under
``paceline run`` (``MODEL RANKS THREADS`` alone) it makes a few steps that all reduce gradients.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import unseen_models
from torch.nn.parallel import DistributedDataParallel

WARM, LEAST, MOST, RECORDED = 6, 10, 2000, 8
BLOCK = 6
FIELDS = ("module", "inputs", "target", "loss_fn", "optimizer")


class Training:
    """A model in training, on one rank."""

    def __init__(self, name, ranks, threads):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        step = getattr(unseen_models, name)()
        self.step = step if isinstance(step, dict) else dict(zip(FIELDS, step, strict=True))
        self.ranks = ranks
        module = self.step["module"]
        self.module = DistributedDataParallel(module) if ranks > 1 else module
        self.optimizer = self.step["optimizer"](module.parameters())
        self.number = torch.zeros(1)

    def run(self, *, reduces, meets=False):
        """Make a step; return its seconds."""
        count = self.step.get("accumulation", 1)
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        for number in range(count):
            with self._reducing(reduces and number == count - 1):
                self._loss().backward()
        if meets:
            dist.all_reduce(self.number)
        self.optimizer.step()
        return time.perf_counter() - begin

    def _reducing(self, reduces):
        if self.ranks == 1 or reduces:
            return contextlib.nullcontext()
        return self.module.no_sync()

    def _loss(self):
        inputs = self.step["inputs"]
        if isinstance(inputs, dict):
            return self.module(**inputs)["loss"]
        output = self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)
        return self.step["loss_fn"](output, self.step["target"])


def timed(training, seconds):
    """Return the seconds of steps that reduce gradients, that do not, and that meet only."""
    warm = [training.run(reduces=True) for _ in range(WARM)]
    each = torch.tensor(sorted(warm)[WARM // 2])
    if training.ranks > 1:
        dist.all_reduce(each, dist.ReduceOp.MAX)
    count = max(LEAST, min(MOST, int(seconds / each.item())))
    if training.ranks == 1:
        return [training.run(reduces=True) for _ in range(count)], [], []
    steps, alone, meeting = [], [], []
    while len(steps) < count:
        dist.barrier()
        steps += [training.run(reduces=True) for _ in range(BLOCK)][1:]
        block = []
        for _ in range(BLOCK):
            dist.barrier()
            block.append(training.run(reduces=False))
        alone += block[1:]
        dist.barrier()
        meeting += [training.run(reduces=False, meets=True) for _ in range(BLOCK)][1:]
    return steps, alone, meeting


def measure(name, rank, ranks, threads, store, seconds):
    cores = sorted(os.sched_getaffinity(0))
    if 1 < ranks <= len(cores):
        os.sched_setaffinity(0, cores[rank * threads :][:threads])
    if ranks > 1:
        method = f"file://{store}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    steps, alone, meeting = timed(Training(name, ranks, threads), seconds)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak_bytes = int(lines["VmHWM"].split()[0]) * 1024
    found = {"steps": steps, "alone": alone, "meeting": meeting, "peak_bytes": peak_bytes}
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch's teardown of process groups has aborted ranks


def record(name, ranks, threads):
    dist.init_process_group("gloo")
    training = Training(name, ranks, threads)
    for _ in range(RECORDED):
        training.run(reduces=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        record(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        model, *counts, place, budget = sys.argv[1:]
        measure(model, *map(int, counts), place, float(budget))
