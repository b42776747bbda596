"""Measures collectives between hosts, as a rank of a job: the table of the backend ``paceline``.

Each operation that has two levels is measured both ways, one flat group over gloo and two levels,
at a few sizes; then the interval in which the faster way changes is halved until it is short::

    4 KiB      32 KiB     256 KiB      1 MiB     4 MiB
    flat       flat    x  two levels   ...                measure x, between the two
    flat       flat    |  two levels                      again, until a factor of 2 (quick: 4)

Both ways take turns, so that what disturbs the network meets both. A turn counts with its slowest
rank; so all ranks have the same figures, and measure the same sizes. Imports torch.
"""

from __future__ import annotations

import itertools
import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from paceline.collectives.choice import FLAT, TWO_LEVEL, Crossover
from paceline.collectives.hosts import find_hosts, from_first_rank
from paceline.collectives.options import CollectivesConfig
from paceline.collectives.registration import NAME, register
from paceline.collectives.works import PendingWork
from paceline.core.errors import DeadlineExceeded, UsageError, first_line
from paceline.core.machine import CollectiveCost, CollectivePoint
from paceline.probe.collectives import OPERATIONS, calls_per_run, run_operation
from paceline.probe.figures import ROUNDS, probed, typical_by_round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from paceline.core.machine import Machine
    from paceline.probe.job import JobPlace

KIB = 1024
SIZES_BYTES = (4 * KIB, 32 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
LONG_BYTES = 16 * 1024 * KIB  # not in the quick form
SHORT_CALLS, SHORT_BELOW_BYTES = 8, 256 * KIB  # calls of a turn: ranks leave a barrier unevenly
MOST_HALVINGS = 8  # of one operation, should noise make the two curves cross often
DEADLINE_S = 120.0
_Figures = dict[str, list[float]]  # by way: seconds over all rounds, then of each round


def measure_between_hosts(
    place: JobPlace,
    read_machine: Callable[[], Machine],
    *,
    quick: bool,
    on_progress: Callable[[str], None],
) -> tuple[Machine | None, tuple[CollectiveCost, ...]]:
    """Return rank 0's machine as it was (none on other ranks), and the costs; all ranks call this.

    Args:
        place: of this process in the job.
        read_machine: called on rank 0 alone; if it raises, all ranks raise.
        quick: fewer turns, no messages above 4 MiB.
        on_progress: called with what is being measured.

    Raises:
        UsageError: all ranks are on one host, or each is on a host of its own.
        DeadlineExceeded: a rank did not come.
    """
    register()
    store = _meet(place)
    limit = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=limit
    )
    try:
        own = dist.PrefixStore("probe/", store)
        hosts = find_hosts(own, place.rank, place.ranks, DEADLINE_S)
        _check_hosts(hosts, place.ranks)
        machines: list[Machine] = []

        def decide() -> str:
            machines.append(read_machine())
            return ""

        from_first_rank(own, "machine", place.rank, decide, DEADLINE_S)
        costs = _Probe(hosts, quick, on_progress).measure()
    finally:
        dist.destroy_process_group()
    return (machines[0] if machines else None), costs


def _meet(place: JobPlace) -> Any:
    method = place.init_method
    if method.startswith("tcp:"):
        method += f"?rank={place.rank}&world_size={place.ranks}"
    try:
        store, _, _ = next(rendezvous(method, timeout=timedelta(seconds=DEADLINE_S)))
    except RuntimeError as problem:  # also torch's DistError
        raise DeadlineExceeded(
            f"the {place.ranks} ranks of the job did not meet within {DEADLINE_S:g} s",
            where=f"rank {place.rank}, {place.init_method}",
            why=first_line(problem),
            fix="Start the command on all ranks, with MASTER_ADDR and MASTER_PORT of rank 0's host",
        ) from problem
    return store


def _check_hosts(hosts: Sequence[Sequence[int]], ranks: int) -> None:
    if len(hosts) == 1:
        raise UsageError(
            f"all {ranks} ranks share memory: nothing is between hosts",
            fix=f"Start the ranks on several hosts; for one host: paceline probe --collectives "
            f"{ranks}",
        )
    if len(hosts) == ranks:
        raise UsageError(
            f"each of the {ranks} ranks is on a host of its own: there is only one level",
            fix="Start several ranks on each host, as many as will train",
        )


class _Probe:
    """Measures operations both ways.

    Args:
        hosts: the ranks of each host.
        quick: fewer turns, shorter messages, and a rougher crossover.
        on_progress: called with what is being measured.
    """

    def __init__(
        self, hosts: Sequence[Sequence[int]], quick: bool, on_progress: Callable[[str], None]
    ) -> None:
        config = CollectivesConfig(flat_below_bytes=0)
        self.groups = {
            FLAT: dist.group.WORLD,
            TWO_LEVEL: dist.new_group(backend=NAME, pg_options=config),
        }
        self.hosts = len(hosts)
        self.ranks = dist.get_world_size()
        self.turns = 2 * ROUNDS if quick else 4 * ROUNDS
        self.sizes = SIZES_BYTES if quick else (*SIZES_BYTES, LONG_BYTES)
        self.factor = 4 if quick else 2
        self.on_progress = on_progress

    def measure(self) -> tuple[CollectiveCost, ...]:
        """Return the costs of all operations that have two levels."""
        costs: list[CollectiveCost] = []
        for name in OPERATIONS:
            work = run_operation(name, torch.zeros(KIB), self.groups[TWO_LEVEL])
            if getattr(work, "path", "gloo") != PendingWork.path:
                continue
            self.on_progress(f"{name} of {self.ranks} ranks on {self.hosts} hosts")
            curves = self._curves(name)
            flat, two_level = (self._cost(name, way, curves) for way in (FLAT, TWO_LEVEL))
            self.on_progress(f"{name}: {describe(Crossover.between(flat, two_level))}")
            costs += (flat, two_level)
        return tuple(costs)

    def _curves(self, name: str) -> dict[int, _Figures]:
        """Return the figures at all sizes, and at others between which the faster way changes."""
        curves = {size: self._figures(name, size) for size in self.sizes}
        for _ in range(MOST_HALVINGS):
            size = next_size(_gains_s(curves), self.factor)
            if size is None:
                break
            curves[size] = self._figures(name, size)
        return curves

    def _figures(self, name: str, size_bytes: int) -> _Figures:
        """Return the seconds of a call by way, the slowest rank's."""
        data = torch.zeros(size_bytes // 4)
        calls = calls_per_run(name, self.ranks)
        runs = max(1, SHORT_CALLS // calls) if size_bytes < SHORT_BELOW_BYTES else 1
        for group in self.groups.values():
            run_operation(name, data, group)
        seconds = torch.empty(self.turns, len(self.groups), dtype=torch.float64)
        for turn in range(self.turns):
            for way, group in enumerate(self.groups.values()):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(runs):
                    run_operation(name, data, group)
                seconds[turn, way] = (time.perf_counter() - begin) / (runs * calls)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        columns = seconds.T.tolist()
        return {
            way: typical_by_round(column) for way, column in zip(self.groups, columns, strict=True)
        }

    def _cost(self, name: str, way: str, curves: dict[int, _Figures]) -> CollectiveCost:
        return CollectiveCost(
            backend="gloo" if way == FLAT else NAME,
            operation=name,
            algorithm=way,
            ranks=self.ranks,
            hosts=self.hosts,
            level="network",
            points=tuple(
                CollectivePoint(bytes=float(size), seconds=probed(row))
                for size, row in zip(sorted(curves), _rising(curves, way), strict=True)
            ),
        )


def _rising(curves: dict[int, _Figures], way: str) -> NDArray[np.float64]:
    """Return the figures of a way by size, shape (sizes, 1 + ROUNDS), in rising order.

    Fewer bytes never take longer: what looks so was disturbed, and counts as the larger message
    did. Raising the larger one instead would spread a disturbance to all sizes above.
    """
    figures = np.array([curves[size][way] for size in sorted(curves)])
    rising: NDArray[np.float64] = np.minimum.accumulate(figures[::-1], axis=0)[::-1]
    return rising


def _gains_s(curves: dict[int, _Figures]) -> dict[int, float]:
    """Return by how much two levels are faster at each size."""
    gains_s = _rising(curves, FLAT)[:, 0] - _rising(curves, TWO_LEVEL)[:, 0]
    return dict(zip(sorted(curves), gains_s.tolist(), strict=True))


def next_size(gains_s: dict[int, float], factor: float) -> int | None:
    """Return the size to measure next, between two at which different ways are faster.

    None if each such interval is at most `factor` wide.

    >>> next_size({4096: -1.0, 65536: 2.0}, 4), next_size({4096: -1.0, 16384: 2.0}, 4)
    (16384, None)
    """
    for low, high in itertools.pairwise(sorted(gains_s)):
        if (gains_s[low] > 0) != (gains_s[high] > 0) and high > factor * low:
            return math.isqrt(low * high) // 4 * 4
    return None


def describe(crossover: Crossover) -> str:
    """Return in words which sizes take which way.

    >>> describe(Crossover(sizes_bytes=(20480.0,)))
    'flat, two levels from 20.0 KiB'
    >>> describe(Crossover(sizes_bytes=(2.5 * 1024 * KIB,), starts_flat=False))
    'two levels, flat from 2.5 MiB'
    """
    ways = itertools.cycle(
        ("flat", "two levels") if crossover.starts_flat else ("two levels", "flat")
    )
    text = next(ways)
    for way, size in zip(ways, crossover.sizes_bytes, strict=False):
        text += f", {way} from {_size_text(size)}"
    return text


def _size_text(size_bytes: float) -> str:
    kibibytes = size_bytes / KIB
    return f"{kibibytes:.1f} KiB" if kibibytes < KIB else f"{kibibytes / KIB:.1f} MiB"
