"""Recursive halving and doubling: log2(p) exchanges of halves, quarters, eighths of the message.

As few bytes as the ring, in 2 log2(p) steps instead of 2 (p - 1): wins for medium messages. Where p
is no power of two, the first ranks pair up before and after (`_fold`), which adds two steps that
move the full message: 8 ranks are faster than 9. Recursive doubling exchanges the full message
log2(p) times: the fewest steps of all, for small messages.
Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.schedules.compose import reverse, split, then
from paceline.schedules.schedule import Schedule, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence


def halving_doubling(
    operation: Literal["all_reduce", "reduce_scatter", "all_gather"], ranks: int
) -> Schedule:
    """Return recursive halving (reduce_scatter), doubling (all_gather), or both, for any `ranks`.

    Cost: with p a power of two, log2(p) messages and n (p-1)/p bytes per rank for each of the two;
    otherwise up to two more messages of n bytes each.
    """
    chunks = core_size(ranks) if operation == "all_reduce" else ranks
    bounds = split(0, chunks, chunks)
    parts = {
        "reduce_scatter": lambda: halving_reduce_scatter(range(ranks), bounds),
        "all_gather": lambda: reverse(halving_reduce_scatter(range(ranks), bounds)),
        "all_reduce": lambda: halving_all_reduce(range(ranks), bounds),
    }
    return Schedule(
        operation=operation,
        algorithm="halving-doubling",
        ranks=ranks,
        chunks=chunks,
        transfers=tuple(parts[operation]()),
    )


def recursive_doubling(ranks: int) -> Schedule:
    """Return the all-reduce that exchanges full messages, for any number of `ranks`.

    Cost: log2(p) messages of n bytes per rank, and two more where p is no power of two.
    """
    core = _core(range(ranks))
    exchanges = [
        Transfer(step, source, core[i ^ (1 << step)], 0, 1, True)
        for step in range(len(core).bit_length() - 1)
        for i, source in enumerate(core)
    ]
    fold = _fold(range(ranks), 0, 1)
    return Schedule(
        operation="all_reduce",
        algorithm="recursive-doubling",
        ranks=ranks,
        chunks=1,
        transfers=tuple(then(fold, exchanges, reverse(fold))),
    )


def halving_reduce_scatter(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return the part after which member i holds block i; arguments as in `ring_reduce_scatter`.

    A member that stands for a pair reduces the blocks of both, then hands one of them back.
    """
    pairs = _pairs(members)
    core_bounds = [bound for i, bound in enumerate(bounds) if i % 2 == 0 or i > 2 * len(pairs)]
    hand_back = [
        Transfer(0, standing, folded, bounds[2 * i], bounds[2 * i + 1], False)
        for i, (folded, standing) in enumerate(pairs)
    ]
    fold = _fold(members, bounds[0], bounds[-1])
    return then(fold, _halve(_core(members), core_bounds), hand_back)


def halving_all_reduce(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return the part after which all members hold all blocks.

    Args:
        members: ranks.
        bounds: of `core_size(len(members))` equal blocks.
    """
    fold = _fold(members, bounds[0], bounds[-1])
    halves = _halve(_core(members), bounds)
    return then(fold, halves, reverse(halves), reverse(fold))


def core_size(count: int) -> int:
    """Return the largest power of two that is not larger than `count`.

    >>> core_size(6), core_size(8)
    (4, 8)
    """
    return 1 << (count.bit_length() - 1)


def _pairs(members: Sequence[int]) -> list[tuple[int, int]]:
    """Return (folded, standing) members: as many pairs from the front as exceed a power of two."""
    excess = len(members) - core_size(len(members))
    return [(members[2 * i], members[2 * i + 1]) for i in range(excess)]


def _core(members: Sequence[int]) -> list[int]:
    """Return the power of two of members that are left when each pair is one member."""
    folded = {first for first, _ in _pairs(members)}
    return [member for member in members if member not in folded]


def _fold(members: Sequence[int], begin: int, end: int) -> list[Transfer]:
    """Return the step in which the first member of each pair gives its data to the second."""
    return [Transfer(0, folded, standing, begin, end, True) for folded, standing in _pairs(members)]


def _halve(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return recursive halving between a power of two of members, one block each.

    In each step a member keeps the half of its range that holds its own block, and sends the other
    half to the partner at that distance.
    """
    transfers = []
    distance, step = len(members) // 2, 0
    while distance:
        for i, source in enumerate(members):
            partner = i ^ distance
            first = partner // distance * distance  # the blocks of the partner's half
            begin, end = bounds[first], bounds[first + distance]
            transfers.append(Transfer(step, source, members[partner], begin, end, True))
        distance, step = distance // 2, step + 1
    return transfers
