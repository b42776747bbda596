"""Proposes schedules for an operation, by predicted time: what a short measurement then confirms.

Every generator is tried with the parameters that fit the hosts. The prediction ranks algorithms; it
is not meant to replace a measured `CollectiveCost` where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.schedules.cost import schedule_s
from paceline.schedules.groups import check_groups
from paceline.schedules.halving import halving_doubling, recursive_doubling
from paceline.schedules.hierarchy import torus, two_level_leader, two_level_sharded
from paceline.schedules.ring import ring
from paceline.schedules.trees import binomial, chain, chain_binomial, chain_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.schedules.schedule import Operation, Schedule
    from paceline.schedules.topology import Topology
    from paceline.schedules.trees import TreeOperation

CHUNKS = (4, 16, 64, 256)


def candidates(
    operation: Operation, hosts: Sequence[Sequence[int]], *, root: int = 0
) -> list[Schedule]:
    """Return schedules of all algorithms that perform `operation` on ranks of `hosts`.

    Args:
        operation: the collective.
        hosts: the ranks of each host.
        root: of a reduce or broadcast.

    Raises:
        UsageError: not each rank from 0 on is on one host.
    Cost: about a second for an all-reduce of 160 ranks.
    """
    ranks = check_groups(hosts)
    if operation == "reduce" or operation == "broadcast":
        return _trees(operation, hosts, ranks, root)
    found = [ring(operation, ranks), halving_doubling(operation, ranks)]
    if operation == "all_reduce":
        found.append(recursive_doubling(ranks))
        if len(hosts) > 1 and ranks > len(hosts):
            found += _hierarchies(hosts)
    return found


def fastest(
    operation: Operation,
    topology: Topology,
    sizes_bytes: Sequence[float] | NDArray[np.float64],
    *,
    root: int = 0,
) -> list[Schedule]:
    """Return the schedule with the shortest predicted time for each size of the message.

    Arguments as in `candidates` and `schedule_s`.
    """
    schedules = candidates(operation, topology.hosts, root=root)
    seconds = np.array([schedule_s(schedule, topology, sizes_bytes) for schedule in schedules])
    return [schedules[index] for index in seconds.argmin(axis=0)]


def _trees(
    operation: TreeOperation, hosts: Sequence[Sequence[int]], ranks: int, root: int
) -> list[Schedule]:
    found = [binomial(operation, ranks, root=root)]
    for chunks in CHUNKS:
        found.append(binomial(operation, ranks, root=root, chunks=chunks))
        found.append(chain(operation, ranks, root=root, chunks=chunks))
        if len(hosts) > 1 and ranks > len(hosts):
            found.append(chain_binomial(operation, hosts, root=root, chunks=chunks))
            found.append(chain_chain(operation, hosts, root=root, chunks=chunks))
    return found


def _hierarchies(hosts: Sequence[Sequence[int]]) -> list[Schedule]:
    found = [two_level_leader(hosts, across="ring"), two_level_leader(hosts, across="halving")]
    if len({len(host) for host in hosts}) == 1:
        found.append(two_level_sharded(hosts, across="ring"))
        found.append(two_level_sharded(hosts, across="halving"))
        found.append(torus(hosts))
    return found
