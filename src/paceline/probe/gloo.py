"""What communication between two ranks costs as training pays for it. Imports torch.

Each figure is fitted to ``latency + bytes / bandwidth`` by relative least squares, so that small
messages, which decide for small models, count as much as long ones.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.probe.kernels import typical_s

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES_BYTES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)
LEAST_LATENCY_S, LEAST_S_PER_BYTE = 1e-7, 1e-13
CALLS, STEPS = 16, 60  # both ranks must make the same number of calls: no budget of time decides


def fit_line(sizes_bytes: list[float], seconds: list[float]) -> tuple[float, float]:
    """Return (latency_s, bandwidth_bytes_per_s) of the line with the least relative error."""
    sizes, times = np.asarray(sizes_bytes), np.asarray(seconds)
    weighted = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    latency_s, per_byte = np.linalg.lstsq(weighted, np.ones_like(times), rcond=None)[0]
    return max(float(latency_s), LEAST_LATENCY_S), 1.0 / max(float(per_byte), LEAST_S_PER_BYTE)


def measure_collectives(*, quick: bool) -> dict[str, tuple[float, float]]:
    """Return latency and bandwidth of all-reduce and broadcast over gloo."""
    calls = CALLS // 4 if quick else CALLS
    result = {}
    for name, operation, per_call in (("all_reduce", _all_reduce, 1), ("broadcast", _broadcast, 2)):
        seconds = []
        for size in SIZES_BYTES:
            data = torch.zeros(size // 4)
            dist.barrier()
            operation(data)
            seconds.append(typical_s([_timed(operation, data) for _ in range(calls)]) / per_call)
        result[name] = fit_line(list(SIZES_BYTES), seconds)
    return result


def _timed(operation: Callable[[torch.Tensor], object], data: torch.Tensor) -> float:
    begin = time.perf_counter()
    operation(data)
    return time.perf_counter() - begin


def _all_reduce(data: torch.Tensor) -> None:
    dist.all_reduce(data)


def _broadcast(data: torch.Tensor) -> None:
    # The two directions in turn: with one alone the root would run ahead of the other rank.
    dist.broadcast(data, 0)
    dist.broadcast(data, 1)


def measure_ddp(all_reduce: tuple[float, float], *, quick: bool) -> dict[str, float]:
    """Return what DistributedDataParallel adds to a step.

    ``buffers`` are the seconds of sending small buffers (running means) before a forward pass,
    ``forward`` and ``backward`` are its seconds per step besides the collectives; ``bandwidth`` is
    at how many bytes per second gradients are reduced inside it: less than in a bare all-reduce,
    since they are copied into buckets and back and compete with the backward pass for the core.

    Args:
        all_reduce: latency and bandwidth of the bare collective.
        quick: with fewer steps.
    """
    latency_s, bare_bandwidth = all_reduce
    steps = STEPS // 4 if quick else STEPS
    small = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    large = nn.Sequential(*(nn.Linear(768, 768) for _ in range(4)))
    normed = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(4))
    )
    forward_s, backward_s = _added_s(small, torch.randn(8, 32), steps)
    normed_s, _ = _added_s(normed, torch.randn(8, 32), steps)
    _, large_s = _added_s(large, torch.randn(8, 768), steps // 4)
    sizes = [sum(one.nbytes for one in module.parameters()) for module in (small, large)]
    per_byte = max(1 / bare_bandwidth, (large_s - backward_s) / (sizes[1] - sizes[0]))
    return {
        "forward": max(0.0, forward_s),
        "backward": max(0.0, backward_s - latency_s - sizes[0] * per_byte),
        "bandwidth": 1 / per_byte,
        "buffers": max(0.0, normed_s - forward_s),
    }


def _added_s(module: nn.Module, inputs: torch.Tensor, steps: int) -> tuple[float, float]:
    plain_s = _phases_s(module, inputs, steps)
    ddp_s = _phases_s(nn.parallel.DistributedDataParallel(module), inputs, steps)
    return ddp_s[0] - plain_s[0], ddp_s[1] - plain_s[1]


def _phases_s(module: nn.Module, inputs: torch.Tensor, steps: int) -> tuple[float, float]:
    forward, backward = [], []
    for _ in range(steps):
        module.zero_grad()
        begin = time.perf_counter()
        loss = module(inputs).sum()
        middle = time.perf_counter()
        loss.backward()
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
    return typical_s(forward), typical_s(backward)
