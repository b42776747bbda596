"""Measures collectives between ranks of this host, by library. Imports torch.

Over gloo and, where the ranks share memory, over the backend ``paceline``. A collective is measured
at several sizes, which become the curve of a CollectiveCost. Every figure is an array: the value
over all rounds first, then that of each round alone (`figures`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.collectives.registration import NAME, register
from paceline.core.machine import CollectiveCost, CollectivePoint
from paceline.probe.figures import ROUNDS, mean_by_round, probed, typical_by_round

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIZES_BYTES = (4, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)
LARGE_BYTES = 4 << 20  # beyond, half as many calls
CALLS = 16  # all ranks must make the same number of calls: no budget of time decides

# torch 2.13 has new names, and warns of the old ones.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Library:
    """Whose collectives are measured.

    Attributes:
        backend: its name for torch.
        level: of the links that it uses between ranks of a host.
        group: of all ranks.
    """

    backend: str
    level: str
    group: Any


def libraries() -> list[Library]:
    """Return gloo, and the backend ``paceline`` if the ranks share memory; all ranks call this."""
    register()
    ours = dist.new_group(backend=NAME)
    found = [Library("gloo", "loopback", dist.group.WORLD)]
    if ours.shares_memory:
        found.append(Library(NAME, "shared-memory", ours))
    return found


def measure_collectives(
    library: Library, operations: Iterable[str], *, quick: bool
) -> tuple[CollectiveCost, ...]:
    """Return the costs of operations between all ranks; names are keys of `OPERATIONS`.

    The bytes of a point are those that each rank gives to the call.
    """
    costs = []
    for name in operations:
        figures = [_seconds(name, size, library.group, quick=quick) for size in SIZES_BYTES]
        ranks = dist.get_world_size(library.group)
        # More bytes never take less time: what looks so is noise.
        rising = np.maximum.accumulate(np.asarray(figures), axis=0) / calls_per_run(name, ranks)
        seconds, cpu_seconds = rising[:, 0], rising[:, 1]
        costs.append(
            CollectiveCost(
                backend=library.backend,
                operation=name,
                ranks=ranks,
                level=library.level,
                points=tuple(
                    CollectivePoint(
                        bytes=float(size), seconds=probed(row), cpu_seconds=probed(cpu_row)
                    )
                    for size, row, cpu_row in zip(SIZES_BYTES, seconds, cpu_seconds, strict=True)
                ),
            )
        )
    return tuple(costs)


def _seconds(
    name: str, size_bytes: int, group: Any, *, quick: bool
) -> tuple[list[float], list[float]]:
    """Return seconds and CPU seconds of an operation; CPU seconds are means.

    Threads of gloo that wait for each other either use a core meanwhile or not: a few calls take
    several times as much as the others, so that the median of CPU seconds says little.
    """
    calls = CALLS // 2 if quick else CALLS
    if size_bytes > LARGE_BYTES:
        calls = max(ROUNDS, calls // 2)
    data = torch.zeros(size_bytes // 4)
    dist.barrier()
    run_operation(name, data, group)
    samples, cpu_samples = [], []
    for _ in range(calls):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        run_operation(name, data, group)
        samples.append(time.perf_counter() - begin)
        cpu_samples.append(time.process_time() - cpu_begin)
    return typical_by_round(samples), mean_by_round(cpu_samples)


def run_operation(name: str, data: torch.Tensor, group: Any) -> Any:
    """Run an operation between the ranks of a group; return its work, which is over.

    One with a root runs from each of `roots` in turn: with one root alone, it would run ahead of
    the other ranks.
    """
    operation, has_root = OPERATIONS[name]
    work = None
    for root in roots(dist.get_world_size(group)) if has_root else range(1):
        work = operation(data, group, root)
        work.wait()
    return work


def roots(ranks: int) -> range:
    """Return the ranks from which an operation with a root is measured: at most 7, evenly spread.

    >>> list(roots(3)), list(roots(64))
    ([0, 1, 2], [0, 16, 32, 48])
    """
    return range(0, ranks, max(1, ranks // 4))


def calls_per_run(name: str, ranks: int) -> int:
    """Return how many calls `run_operation` makes."""
    return len(roots(ranks)) if OPERATIONS[name][1] else 1


def _all_reduce(data: torch.Tensor, group: Any, root: int) -> Any:
    del root
    return dist.all_reduce(data, group=group, async_op=True)


def _broadcast(data: torch.Tensor, group: Any, root: int) -> Any:
    return dist.broadcast(data, root, group=group, async_op=True)


def _reduce(data: torch.Tensor, group: Any, root: int) -> Any:
    return dist.reduce(data, root, group=group, async_op=True)


def _reduce_scatter(data: torch.Tensor, group: Any, root: int) -> Any:
    del root
    ranks = dist.get_world_size(group)
    whole = data.new_zeros(max(1, data.numel() // ranks) * ranks)
    part = whole.new_empty(whole.numel() // ranks)
    return _REDUCE_SCATTER(part, whole, group=group, async_op=True)


def _all_gather(data: torch.Tensor, group: Any, root: int) -> Any:
    del root
    gathered = data.new_empty(data.numel() * dist.get_world_size(group))
    return _ALL_GATHER(gathered, data, group=group, async_op=True)


# Of each operation its call, which returns a work, and whether it has a root.
OPERATIONS: dict[str, tuple[Callable[[torch.Tensor, Any, int], Any], bool]] = {
    "all_reduce": (_all_reduce, False),
    "broadcast": (_broadcast, True),
    "reduce": (_reduce, True),
    "reduce_scatter": (_reduce_scatter, False),
    "all_gather": (_all_gather, False),
}
