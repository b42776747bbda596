"""Measures what DistributedDataParallel adds to a step of two ranks. Imports torch.

It is the difference between steps with and without it, recorded as those of a run are. Every figure
is an array: the value over all rounds first, then that of each round alone (`figures`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.core.machine import FrameworkOverhead
from paceline.probe.figures import probed, typical_by_round
from paceline.trace.collectors.torch import discarded_recording

if TYPE_CHECKING:
    from paceline.core.machine import CollectiveCost
    from paceline.probe.collectives import Library

LEAST_LATENCY_S, LEAST_S_PER_BYTE = 1e-7, 1e-13
OTHER_BYTES = 16 << 20
STEPS = 60  # both ranks must make the same number of steps: no budget of time decides


def fit_line(sizes_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return (latency_s, s_per_byte) of the line with the least relative error."""
    weighted = np.stack([np.ones_like(sizes_bytes), sizes_bytes], axis=1) / seconds[:, None]
    latency_s, per_byte = np.linalg.lstsq(weighted, np.ones_like(seconds), rcond=None)[0]
    return max(float(latency_s), LEAST_LATENCY_S), max(float(per_byte), LEAST_S_PER_BYTE)


def measure_ddp(
    library: Library, all_reduce: CollectiveCost, *, threads: int, quick: bool
) -> tuple[FrameworkOverhead, ...]:
    """Return what DistributedDataParallel adds to a step on two ranks.

    ``wrapper``: seconds per step besides the collectives. ``reduction``: seconds for each byte of
    gradients beyond the bare all-reduce, since they are copied into buckets and back and compete
    with the backward pass for the core. ``buffer_broadcast``: one of the two broadcasts of small
    buffers (running means, and the counters of batches) before a forward pass.

    Args:
        library: over which gradients are reduced.
        all_reduce: its bare collective.
        threads: compute threads of each rank.
        quick: with fewer steps.
    """
    sizes = np.asarray([point.bytes for point in all_reduce.points[1:]])
    # In these short backward passes the CPU time of a call is all exposed, as `exposed_s` has it.
    times = np.asarray([all_reduce.cpu_seconds_at(size) for size in sizes.tolist()])
    latency_s, bare_s_per_byte = fit_line(sizes, times)
    steps = STEPS // 2 if quick else STEPS
    small = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    large = nn.Sequential(*(nn.Linear(768, 768) for _ in range(4)))
    normed = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(4))
    )
    forward_s, backward_s = _added_s(library, small, torch.randn(8, 32), steps)
    normed_s, _ = _added_s(library, normed, torch.randn(8, 32), steps)
    _, large_s = _added_s(library, large, torch.randn(8, 768), steps // 2)
    few, many = (sum(tensor.nbytes for tensor in module.parameters()) for module in (small, large))
    s_per_byte = np.maximum(bare_s_per_byte, (large_s - backward_s) / (many - few))
    where = {
        "framework": "ddp",
        "backend": library.backend,
        "threads": threads,
        "processes": 2,
    }
    return tuple(
        FrameworkOverhead.from_json({**where, "what": what, "phase": phase, unit: figure.to_json()})
        for what, phase, unit, figure in (
            ("wrapper", "forward", "seconds", probed(np.maximum(0.0, forward_s))),
            (
                "wrapper",
                "backward",
                "seconds",
                probed(np.maximum(0.0, backward_s - latency_s - few * s_per_byte)),
            ),
            ("reduction", "backward", "seconds_per_byte", probed(s_per_byte - bare_s_per_byte)),
            (
                "buffer_broadcast",
                "forward",
                "seconds",
                probed(np.maximum(0.0, (normed_s - forward_s) / 2)),
            ),
        )
    )


def _added_s(
    library: Library, module: nn.Module, inputs: torch.Tensor, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    plain_s = _phases_s(module, inputs, steps)
    with discarded_recording(dist.get_rank(), dist.get_world_size()):
        model = nn.parallel.DistributedDataParallel(module, process_group=library.group)
        ddp_s = _phases_s(model, inputs, steps)
    return ddp_s[0] - plain_s[0], ddp_s[1] - plain_s[1]


def _phases_s(module: nn.Module, inputs: torch.Tensor, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of forward and of backward, by round.

    As in training, they come when other data fill the caches: DDP's own code is then as cold as it
    is in a model of ordinary size.
    """
    forward, backward = [], []
    other = torch.zeros(OTHER_BYTES // 4)
    for _ in range(steps):
        module.zero_grad()
        other.add_(1.0)
        begin = time.perf_counter()
        loss = module(inputs).sum()
        forward.append(time.perf_counter() - begin)
        other.add_(1.0)
        begin = time.perf_counter()
        loss.backward()
        backward.append(time.perf_counter() - begin)
    return np.asarray(typical_by_round(forward)), np.asarray(typical_by_round(backward))
