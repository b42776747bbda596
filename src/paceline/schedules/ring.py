"""The ring: each rank sends to the next one, in every step a p-th of the message.

Bandwidth-optimal at any number of ranks, and each rank talks to two others only; latency grows with
the number of ranks. Wins for large messages, unless there are many ranks or several to a host.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
JPDC 69(2), 2009.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.schedules.compose import reverse, split, then
from paceline.schedules.schedule import Schedule, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence


def ring(operation: Literal["all_reduce", "reduce_scatter", "all_gather"], ranks: int) -> Schedule:
    """Return the ring in the order of the ranks.

    Cost: p - 1 messages of n/p bytes per rank for reduce_scatter and all_gather, twice as many for
    all_reduce.
    """
    part = ring_reduce_scatter(range(ranks), split(0, ranks, ranks))
    parts = {
        "reduce_scatter": lambda: part,
        "all_gather": lambda: reverse(part),
        "all_reduce": lambda: then(part, reverse(part)),
    }
    return Schedule(
        operation=operation,
        algorithm="ring",
        ranks=ranks,
        chunks=ranks,
        transfers=tuple(parts[operation]()),
    )


def ring_reduce_scatter(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return the part after which member i holds block i, reduced over all members.

    Args:
        members: ranks in the order of the ring.
        bounds: of the blocks, as `split` returns them; one block per member.
    """
    size = len(members)
    return [
        Transfer(step, source, members[(i + 1) % size], bounds[block], bounds[block + 1], True)
        for step in range(size - 1)
        for i, source in enumerate(members)
        for block in [(i - 1 - step) % size]
    ]


def ring_all_reduce(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return the part after which all members hold all blocks; arguments as above."""
    part = ring_reduce_scatter(members, bounds)
    return then(part, reverse(part))
