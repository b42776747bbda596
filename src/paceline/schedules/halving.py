"""Recursive halving and doubling: log2(p) exchanges of halves, quarters, eighths of the message.

As few bytes as the ring, in 2 log2(p) steps instead of 2 (p - 1): wins for medium messages. Where p
is no power of two, the first ranks pair up before and after (`_fold`), which adds two steps that
move the full message: 8 ranks are faster than 9. Recursive doubling exchanges the full message
log2(p) times: the fewest steps of all, for small messages.
Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.schedules.compose import reverse, split, then
from paceline.schedules.schedule import Schedule, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence


def halving_doubling(
    operation: Literal["all_reduce", "reduce_scatter", "all_gather"], ranks: int
) -> Schedule:
    """Return recursive halving (reduce_scatter), doubling (all_gather), or both, for any `ranks`.

    Cost: with p a power of two, log2(p) messages and n (p-1)/p bytes per rank and half; otherwise
    up to two more messages of n bytes each.
    """
    bounds = split(0, ranks, ranks)
    parts = {
        "reduce_scatter": lambda: halving_reduce_scatter(range(ranks), bounds),
        "all_gather": lambda: reverse(halving_reduce_scatter(range(ranks), bounds)),
        "all_reduce": lambda: halving_all_reduce(range(ranks), bounds),
    }
    return Schedule(
        operation=operation,
        algorithm="halving-doubling",
        ranks=ranks,
        chunks=ranks,
        transfers=tuple(parts[operation]()),
    )


def recursive_doubling(ranks: int) -> Schedule:
    """Return the all-reduce that exchanges full messages, for any number of `ranks`.

    Cost: log2(p) messages of n bytes per rank, and two more where p is no power of two.
    """
    folded = _fold(range(ranks), split(0, ranks, ranks))
    core, last = folded.members, len(folded.members).bit_length() - 1
    exchanges = [
        Transfer(step, source, core[i ^ (1 << step)], 0, 1, True)
        for step in range(last)
        for i, source in enumerate(core)
    ]
    fold = [transfer._replace(begin=0, end=1) for transfer in folded.fold]
    return Schedule(
        operation="all_reduce",
        algorithm="recursive-doubling",
        ranks=ranks,
        chunks=1,
        transfers=tuple(then(fold, exchanges, reverse(fold))),
    )


def halving_reduce_scatter(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return the part after which member i holds block i; arguments as in `ring_reduce_scatter`."""
    folded = _fold(members, bounds)
    hand_back = [
        Transfer(0, kept, left_out, bounds[block], bounds[block + 1], False)
        for block, (left_out, kept) in _pairs(members)
    ]
    return then(folded.fold, _halve(folded.members, folded.bounds), hand_back)


def halving_all_reduce(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return the part after which all members hold all blocks."""
    folded = _fold(members, bounds)
    halves = _halve(folded.members, folded.bounds)
    return then(folded.fold, halves, reverse(halves), reverse(folded.fold))


class _Folded(NamedTuple):
    """The power of two of members that go on, their blocks, and the transfers that lead there."""

    members: list[int]
    bounds: list[int]
    fold: list[Transfer]


def _pairs(members: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Return (index of the first, (first, second)) of the pairs that must become one member each.

    As many pairs from the front as members exceed a power of two.
    """
    excess = len(members) - (1 << (len(members).bit_length() - 1))
    return [(2 * i, (members[2 * i], members[2 * i + 1])) for i in range(excess)]


def _fold(members: Sequence[int], bounds: Sequence[int]) -> _Folded:
    """Let the second member of each pair stand for both, with the blocks of both."""
    pairs = _pairs(members)
    fold = [
        Transfer(0, left_out, kept, bounds[0], bounds[-1], True) for _, (left_out, kept) in pairs
    ]
    left_out = {index for index, _ in pairs}
    kept = [member for index, member in enumerate(members) if index not in left_out]
    joined = {index + 1 for index in left_out}  # bounds within a pair
    return _Folded(kept, [bound for i, bound in enumerate(bounds) if i not in joined], fold)


def _halve(members: Sequence[int], bounds: Sequence[int]) -> list[Transfer]:
    """Return recursive halving between a power of two of members.

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
