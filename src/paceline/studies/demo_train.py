"""The demo's training script: an ordinary DDP loop over a pack of digits, run like any other.

Run as a program it trains; as a module it offers `training_step` to the prediction. Apart from
the flags that slow a rank on purpose there is nothing here that a user's script would not have.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from paceline.store import PackDataset
from paceline.studies.demo_files import BATCH, PACK, SIDE

if TYPE_CHECKING:
    from collections.abc import Sequence


def decode(body: bytes) -> torch.Tensor:
    """Return a PNG's pixels, shape (1, side, side), float32 from 0 to 1."""
    pixels = np.asarray(Image.open(io.BytesIO(body)), dtype=np.float32) / 255
    return torch.from_numpy(pixels).unsqueeze(0)


def split(count: int) -> tuple[list[int], list[int]]:
    """Return (train, test) sample ids: every fifth sample is for testing."""
    return [i for i in range(count) if i % 5], list(range(0, count, 5))


def build_model() -> nn.Sequential:
    """Return a small CNN with batch normalisation."""
    # As in examples/ddp_digits.py, which is not there when Paceline is installed without its
    # sources, and must itself run without Paceline.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (SIDE // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the demo."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def training_step() -> dict[str, Any]:
    """Return the input of the prediction: one step, and the time to load a sample."""
    from paceline.core.workload import Dataset

    torch.set_num_threads(1)
    data = PackDataset(PACK, decode)
    train, _ = split(len(data))
    module = build_model()
    return {
        "module": module,
        "inputs": torch.zeros(BATCH, 1, SIDE, SIDE),
        "target": torch.zeros(BATCH, dtype=torch.long),
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": build_optimizer,
        "dataset": Dataset(
            samples_count=len(train),
            sample_bytes=int(data.pack.lengths.mean()),
            seconds_per_sample=_seconds_per_sample(Subset(data, train), module),
        ),
    }


def _seconds_per_sample(data: Subset[Any], module: nn.Module) -> float:
    """Time the loader between training steps, where a batch finds the caches as a step left them.

    In a loop of its own it takes four fifths of that. The median counts, as in a run's figures.
    """
    optimizer, loss_fn = build_optimizer(module.parameters()), nn.CrossEntropyLoss()
    batches = iter(DataLoader(data, BATCH, shuffle=True))
    seconds = []
    for _ in range(40):
        begin = time.perf_counter()
        images, labels = next(batches)
        seconds.append(time.perf_counter() - begin)
        optimizer.zero_grad()
        loss_fn(module(images), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    return statistics.median(seconds[1:]) / BATCH


class Slowdown:
    """Slows one rank on purpose within a window of steps, and measures by how much it did."""

    def __init__(self, cause: str, milliseconds: float, first: int, last: int) -> None:
        self.cause = cause
        self.seconds = milliseconds / 1e3
        self.first = first
        self.last = last
        self.step = 0
        self.measured_s: list[float] = []

    def apply(self, cause: str) -> None:
        """Lose the time here if `cause` is the one to inject and the step is in the window."""
        if cause != self.cause or not self.first <= self.step <= self.last:
            return
        begin = time.perf_counter()
        if cause == "data":  # as a slow file system would
            threading.Event().wait(self.seconds)
        else:
            square = torch.ones(64, 64)
            while time.perf_counter() - begin < self.seconds:
                square = square @ square / 64
        self.measured_s.append(time.perf_counter() - begin)


class SlowedDataset(PackDataset):  # type: ignore[misc]  # handed out lazily, untyped
    """The pack, read through the slowdown."""

    slowdown: Slowdown | None = None

    def __getitems__(self, samples: Sequence[int]) -> list[tuple[Any, int]]:
        """Return a batch; late, where the slowdown says so."""
        if self.slowdown:
            self.slowdown.apply("data")
        items: list[tuple[Any, int]] = super().__getitems__(samples)
        return items


def main() -> None:
    """Train, test, and write the results for the demo."""
    options = _options()
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    rank = dist.get_rank()
    slowdown = None
    if rank == options.slow_rank:
        slowdown = Slowdown(options.slow_cause, options.slow_ms, *options.slow_steps)
    data = SlowedDataset(options.pack, decode)
    data.slowdown = slowdown
    train, test = split(len(data))
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=options.seed)
    loader = DataLoader(Subset(data, train), BATCH, sampler=sampler)
    module = build_model()
    if slowdown:
        module.register_forward_pre_hook(lambda *_: slowdown.apply("compute"))
    model = DistributedDataParallel(module)
    optimizer = build_optimizer(model.parameters())
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss_fn(model(images), labels).backward()
            optimizer.step()
            if slowdown:
                slowdown.step += 1

    _finish(options.result, module, data, test, slowdown)
    dist.destroy_process_group()


def _finish(
    result: Path,
    module: nn.Module,
    data: PackDataset,
    test: list[int],
    slowdown: Slowdown | None,
) -> None:
    """Test the model, and have rank 0 write the accuracy and the injected slow-down."""
    injected = None
    if slowdown and slowdown.measured_s:
        injected = {
            "rank": dist.get_rank(),
            "cause": slowdown.cause,
            "injected_ms": 1e3 * statistics.median(slowdown.measured_s),
            "first_step": slowdown.first,
            "last_step": min(slowdown.last, slowdown.first + len(slowdown.measured_s) - 1),
        }
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, injected)
    if dist.get_rank() != 0:
        return
    module.eval()
    with torch.no_grad():
        images, labels = next(iter(DataLoader(Subset(data, test), len(test))))
        accuracy = (module(images).argmax(1) == labels).float().mean().item()
    found = next((report for report in everybody if report), None)
    result.write_text(json.dumps({"test_accuracy": round(accuracy, 4), "injected": found}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pack", type=Path, default=PACK)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-ms", type=float, default=0.0)
    parser.add_argument("--slow-cause", choices=("data", "compute"), default="data")
    parser.add_argument("--slow-steps", type=int, nargs=2, default=(0, -1))
    return parser.parse_args()


if __name__ == "__main__":
    main()
