"""Proposes schedules for an operation, by predicted time: what a short measurement then confirms.

Every generator is tried with the parameters that fit the hosts. The prediction ranks algorithms; it
is not meant to replace a measured `CollectiveCost` where there is one.

Between thousands of ranks some algorithms have millions of transfers: a limit leaves them out
before they are made. Those with the fewest steps always fit it, with 2 p log2(p) transfers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.schedules.cost import schedule_s
from paceline.schedules.groups import check_groups
from paceline.schedules.halving import halving_doubling, recursive_doubling
from paceline.schedules.hierarchy import torus, two_level_leader, two_level_sharded
from paceline.schedules.ring import ring
from paceline.schedules.trees import binomial, chain, chain_binomial, chain_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from paceline.schedules.schedule import Operation, Schedule
    from paceline.schedules.topology import Topology
    from paceline.schedules.trees import TreeOperation

CHUNKS = (4, 16, 64, 256)


class _Algorithm(NamedTuple):
    """A schedule that was not made yet, and about how many transfers it has."""

    transfers: int
    make: Callable[[], Schedule]


def candidates(
    operation: Operation,
    hosts: Sequence[Sequence[int]],
    *,
    root: int = 0,
    most_transfers: int | None = None,
) -> list[Schedule]:
    """Return schedules of all algorithms that perform `operation` on ranks of `hosts`.

    Args:
        operation: the collective.
        hosts: the ranks of each host.
        root: of a reduce or broadcast.
        most_transfers: leave out algorithms with more; None: no limit. The smallest one is kept.

    Raises:
        UsageError: not each rank from 0 on is on one host.
    Cost: about a second for an all-reduce of 160 ranks; 5 us for each transfer.
    """
    ranks = check_groups(hosts)
    if operation == "reduce" or operation == "broadcast":
        found = _trees(operation, hosts, ranks, root)
    else:
        parts = 2 if operation == "all_reduce" else 1
        found = [
            _Algorithm(parts * ranks * (ranks - 1), lambda: ring(operation, ranks)),
            _Algorithm(parts * _halving(ranks), lambda: halving_doubling(operation, ranks)),
        ]
        if operation == "all_reduce":
            found.append(_Algorithm(_halving(ranks), lambda: recursive_doubling(ranks)))
            if len(hosts) > 1 and ranks > len(hosts):
                found += _hierarchies(hosts)
    limit = most_transfers
    if limit is not None:
        limit = max(limit, min(algorithm.transfers for algorithm in found))
    return [
        algorithm.make() for algorithm in found if limit is None or algorithm.transfers <= limit
    ]


def fastest(
    operation: Operation,
    topology: Topology,
    sizes_bytes: Sequence[float] | NDArray[np.float64],
    *,
    root: int = 0,
    most_transfers: int | None = None,
) -> list[Schedule]:
    """Return the schedule with the shortest predicted time for each size of the message.

    Arguments as in `candidates` and `schedule_s`.
    """
    schedules = candidates(operation, topology.hosts, root=root, most_transfers=most_transfers)
    seconds = np.array([schedule_s(schedule, topology, sizes_bytes) for schedule in schedules])
    return [schedules[index] for index in seconds.argmin(axis=0)]


def _halving(ranks: int) -> int:
    """Return the most transfers of recursive halving, or doubling, with its folds."""
    return ranks * (max(1, ranks.bit_length() - 1) + 1)


def _trees(
    operation: TreeOperation, hosts: Sequence[Sequence[int]], ranks: int, root: int
) -> list[_Algorithm]:
    found = [_Algorithm(ranks - 1, lambda: binomial(operation, ranks, root=root))]
    is_two_level = len(hosts) > 1 and ranks > len(hosts)
    for chunks in CHUNKS:
        found += _of_chunks(operation, hosts if is_two_level else (), ranks, root, chunks)
    return found


def _of_chunks(
    operation: TreeOperation, hosts: Sequence[Sequence[int]], ranks: int, root: int, chunks: int
) -> Iterable[_Algorithm]:
    makers: list[Callable[[], Schedule]] = [
        lambda: binomial(operation, ranks, root=root, chunks=chunks),
        lambda: chain(operation, ranks, root=root, chunks=chunks),
    ]
    if hosts:
        makers += [
            lambda: chain_binomial(operation, hosts, root=root, chunks=chunks),
            lambda: chain_chain(operation, hosts, root=root, chunks=chunks),
        ]
    return [_Algorithm(chunks * (ranks - 1), make) for make in makers]


def _hierarchies(hosts: Sequence[Sequence[int]]) -> list[_Algorithm]:
    count, ranks = len(hosts), sum(len(host) for host in hosts)
    around, halved = 2 * count * (count - 1), 2 * _halving(count)
    found = [
        _Algorithm(2 * ranks + around, lambda: two_level_leader(hosts, across="ring")),
        _Algorithm(2 * ranks + halved, lambda: two_level_leader(hosts, across="halving")),
    ]
    size = len(hosts[0])
    if len({len(host) for host in hosts}) == 1:
        inside = 2 * ranks * (size - 1)
        rows = squarest_rows(hosts)
        found += [
            _Algorithm(inside + size * around, lambda: two_level_sharded(hosts, across="ring")),
            _Algorithm(inside + size * halved, lambda: two_level_sharded(hosts, across="halving")),
            _Algorithm(_torus(hosts), lambda: torus(hosts)),
        ]
        if len(rows) < count:
            found.append(_Algorithm(_torus(rows), lambda: torus(rows)))
    return found


def _torus(rows: Sequence[Sequence[int]]) -> int:
    columns = len(rows[0])
    return 4 * len(rows) * columns * (len(rows) + columns - 2)


def squarest_rows(hosts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return rows of one or several whole hosts each, nearly as many as a row has ranks.

    The fewer steps a torus takes, the nearer its grid is to a square.

    >>> squarest_rows([(0,), (1,), (2,), (3,)])
    ((0, 1), (2, 3))

    Args:
        hosts: the ranks of each host, equally many on each.
    """
    count, size = len(hosts), len(hosts[0])
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    joined = min(divisors, key=lambda number: abs(math.log(number * size * number / count)))
    return tuple(
        tuple(rank for host in hosts[begin : begin + joined] for rank in host)
        for begin in range(0, count, joined)
    )
