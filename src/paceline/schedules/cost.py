"""Predicts how long a Schedule takes on a Machine, for all sizes of message in one pass.

The alpha-beta-gamma model, replayed transfer by transfer. A message of m bytes from rank i to rank
j begins when both have ended their previous step, and takes::

    A + D      A   latency of the link, once for each message that i sends or j receives in the
                   step, whichever sum is larger: a rank starts its messages one by one
               D   bytes of the step on the part of the link that is shared, over its bandwidth

Reducing m bytes then takes m * gamma on rank j. `Link.sharing` says which part is shared: that of
the ``pair`` alone; what a ``device`` or a ``node`` sends, and what it receives (links are full
duplex); or ``all`` messages of the level. Messages share a link only with those of the same step:
the model does not see that ranks which exchange no data drift apart.

All terms but the latency are proportional to the size, so that one replay serves an array of sizes.
It does not see small-message protocols, caches, or the network between hosts beyond their links;
`paceline probe` measures those as `CollectiveCost`, which `paceline.perf.communication` uses.
Source: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994; Thakur et al.
2005 (gamma); Chan, Heimlich, Purkayastha and van de Geijn, Collective communication: theory,
practice, and experience, CCPE 19(13), 2007.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UsageError
from paceline.schedules.topology import host_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.machine import Link
    from paceline.schedules.schedule import Schedule
    from paceline.schedules.topology import Topology


def schedule_s(
    schedule: Schedule, topology: Topology, sizes_bytes: Sequence[float] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds that the schedule takes for each size of the message.

    Args:
        schedule: correct, see `check`.
        topology: of the same ranks.
        sizes_bytes: of the buffer of one rank: for an all_gather that of the result, whereas a
            `CollectiveCost` counts what a rank passes to the call.

    Returns:
        Seconds from the call on all ranks to the last rank's return, shape (sizes,).

    Raises:
        UsageError: the topology has another number of ranks.
    Cost: about 0.1 s for 50,000 transfers.
    """
    ranks = sum(len(host) for host in topology.hosts)
    if ranks != schedule.ranks:
        raise UsageError(
            f"the schedule is for {schedule.ranks} ranks, the hosts have {ranks}",
            fix="Make the schedule for the ranks of these hosts",
        )
    sizes = np.asarray(sizes_bytes, float)
    if not schedule.transfers:  # one rank
        return np.zeros(len(sizes))
    at_s = np.zeros((schedule.ranks, len(sizes)))
    messages = _MessageTable.of(schedule, topology)
    for begin, end in messages.steps:
        _replay(at_s, messages, slice(begin, end), sizes)
    last_s: NDArray[np.float64] = at_s.max(axis=0)
    return last_s


def level_volumes(
    schedule: Schedule, hosts: Sequence[Sequence[int]]
) -> dict[str, tuple[int, float]]:
    """Return the traffic inside and across hosts, over all ranks.

    Returns:
        By ``inside`` and ``across``: number of messages, and bytes per byte of the message's size.
    """
    table, host_of = _table(schedule), host_indices(hosts)
    crosses = host_of[table[:, 1]] != host_of[table[:, 2]]
    chunks = table[:, 4] - table[:, 3]
    return {
        level: (int(mask.sum()), float(chunks[mask].sum()) / schedule.chunks)
        for level, mask in (("inside", ~crosses), ("across", crosses))
    }


def best_chunks(hops: int, size_bytes: float, link: Link, *, most: int = 1024) -> int:
    """Return the number of chunks with which a pipeline over `hops` links is fastest.

    (hops - 1 + C) (a + n b / C) is least where C = sqrt((hops - 1) n b / a). Few chunks make the
    pipeline's fill long, many cost latency.

    Args:
        hops: links from the end of the chain to its root.
        size_bytes: n, of the message.
        link: the slowest of the chain.
        most: upper limit.

    Source: minimum of the formula of `paceline.schedules.trees`.
    """
    move_s = size_bytes / link.bandwidth_bytes_per_s.value
    latency_s = max(link.latency_s.value, 1e-12)
    return min(most, max(1, round(math.sqrt(max(hops - 1, 0) * move_s / latency_s))))


@dataclass(frozen=True, slots=True)
class _MessageTable:
    """The transfers of a schedule as columns, in order of steps.

    Attributes:
        steps: (begin, end) of the rows of each step.
        source: rank.
        destination: rank.
        latency_s: A of each message.
        wire_s_per_byte: D of each message per byte of the collective's size.
        reduce_s_per_byte: the same for what the destination reduces in the step.
    """

    steps: list[tuple[int, int]]
    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    latency_s: NDArray[np.float64]
    wire_s_per_byte: NDArray[np.float64]
    reduce_s_per_byte: NDArray[np.float64]

    @classmethod
    def of(cls, schedule: Schedule, topology: Topology) -> _MessageTable:
        table = _table(schedule)
        step, source, destination = table[:, 0], table[:, 1], table[:, 2]
        share = (table[:, 4] - table[:, 3]) / schedule.chunks
        host_of = topology.host_of()
        crosses = host_of[source] != host_of[destination]
        latency_s, wire = np.zeros(len(table)), np.zeros(len(table))
        for link, mask in ((topology.inside, ~crosses), (topology.across, crosses)):
            if mask.any():
                assert link is not None
                latency_s[mask] = link.latency_s.value
                shared = _shared_bytes(link, topology, table[mask], share[mask])
                wire[mask] = shared / link.bandwidth_bytes_per_s.value
        reduced = share * table[:, 5] * topology.reduction_s_per_byte
        bounds = [0, *(np.flatnonzero(np.diff(step)) + 1).tolist(), len(table)]
        return cls(
            steps=list(itertools.pairwise(bounds)),
            source=source,
            destination=destination,
            latency_s=np.maximum(
                _sum_by((step, source), latency_s), _sum_by((step, destination), latency_s)
            ),
            wire_s_per_byte=wire,
            reduce_s_per_byte=_sum_by((step, destination), reduced),
        )


def _replay(
    at_s: NDArray[np.float64], messages: _MessageTable, rows: slice, sizes: NDArray[np.float64]
) -> None:
    """Advance the ranks' times `at_s`, shape (ranks, sizes), by one step."""
    source, destination = messages.source[rows], messages.destination[rows]
    wire_s = messages.latency_s[rows, None] + messages.wire_s_per_byte[rows, None] * sizes
    end_s = np.maximum(at_s[source], at_s[destination]) + wire_s
    np.maximum.at(at_s, source, end_s)
    np.maximum.at(at_s, destination, end_s + messages.reduce_s_per_byte[rows, None] * sizes)


def _shared_bytes(
    link: Link,
    topology: Topology,
    table: NDArray[np.int64],
    share: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return for each message what moves on its part of the link in its step, itself included."""
    step, source, destination = table[:, 0], table[:, 1], table[:, 2]
    if link.sharing == "pair":
        return _sum_by((step, source, destination), share)
    if link.sharing == "all":
        return _sum_by((step,), share)
    place = topology.device_of() if link.sharing == "device" else topology.host_of()
    return np.maximum(
        _sum_by((step, place[source]), share), _sum_by((step, place[destination]), share)
    )


def _sum_by(
    keys: tuple[NDArray[np.int64], ...], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return for each row the sum of the values of all rows with the same keys."""
    joined = keys[0]
    for key in keys[1:]:
        joined = joined * (int(key.max()) + 1) + key
    _, group = np.unique(joined, return_inverse=True)
    return np.bincount(group, weights=values).astype(float)[group]


def _table(schedule: Schedule) -> NDArray[np.int64]:
    """Return the transfers as rows, with the columns of `Transfer`."""
    return np.array(schedule.transfers, np.int64).reshape(-1, 6)
