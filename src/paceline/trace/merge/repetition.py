"""Finds the steps of a program that marks none: the repetitions of its collectives.

An MPI program has no optimizer. But it mostly has a loop, and all ranks call the collectives of the
whole job in one order, so that the order repeats with each iteration::

    bcast bcast | allreduce allreduce barrier | allreduce allreduce barrier | ... | gather
      before    |           one step          |             one step        |       after

A step ends when the last collective of a repetition is complete. What comes before the first
repetition and after the last is in no step. A program without enough repetitions, or that calls
`MPI_Pcontrol(1)` at the end of each iteration, is left as it is.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.trace.format.events import BY_REPETITION, BY_RUN, EQUAL_SIZES, Kind
from paceline.trace.merge.keys import row_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.trace.format.files import RankTrace

REPETITIONS_MIN = 4  # fewer may be chance
PERIOD_MAX = 1024  # collectives in a repetition
_LEAST = 0.5  # share of the collectives that a loop has
_MOST = 0.9  # from this share on no longer period is looked for


class Repetition(NamedTuple):
    """The loop of an MPI program, in collectives of all ranks."""

    first: int  # number of the collective with which the first repetition begins
    lasts: np.ndarray  # of those with which repetitions end


def common_repetition(ranks: Iterable[RankTrace]) -> Repetition | None:
    """Return the repetition of the collectives of all ranks; None if there is none.

    There is none either if a rank has marks of its own, or if ranks differ in their collectives as
    far as all of them have any.
    """
    codes: list[str] = []  # of the first rank
    shortest = agreed = sys.maxsize
    for number, rank in enumerate(ranks):
        if not _marks_none(rank):
            return None
        own = _signatures(rank, _calls_of_all(rank))
        if number == 0:
            codes = own
        shortest = min(shortest, len(own))
        pairs = zip(own, codes, strict=False)
        end = min(len(own), len(codes))
        differs = (at for at, (a, b) in enumerate(pairs) if a != b)
        agreed = min(agreed, end if own[:end] == codes[:end] else next(differs))
    if not 0 < shortest <= agreed:
        return None
    _, numbers = np.unique(np.array(codes[:shortest]), return_inverse=True)
    period, first, repetitions = find_repetition(numbers)
    if not period:
        return None
    return Repetition(first, first + period * np.arange(1, repetitions + 1) - 1)


def find_repetition(codes: np.ndarray) -> tuple[int, int, int]:
    """Return the period of a sequence, where its repetitions begin, and how many there are.

    >>> find_repetition(np.array([9, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 7]))
    (2, 1, 5)
    >>> find_repetition(np.array([1, 2, 3, 4]))
    (0, 0, 0)

    Args:
        codes: what each element is, shape (elements,).
    """
    count = len(codes)
    best = (0, 0, 0)
    for period in range(1, min(PERIOD_MAX, count // REPETITIONS_MIN) + 1):
        first, covered = _longest(codes[period:] == codes[:-period])
        covered += period
        # A shorter period is given up only for one that repeats for clearly longer.
        if covered // period >= REPETITIONS_MIN and covered * _MOST > best[2]:
            best = (period, first, covered)
        if best[2] >= _MOST * count:
            break
    period, first, covered = best
    return (period, first, covered // period) if covered >= _LEAST * count > 0 else (0, 0, 0)


def _longest(same: np.ndarray) -> tuple[int, int]:
    """Return where the longest run of True begins, and its length."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(begins):
        return 0, 0
    longest = int(np.argmax(lengths))
    return int(begins[longest]), int(lengths[longest])


def _marks_none(rank: RankTrace) -> bool:
    """Whether a trace is of an MPI program, whose only mark can be that of its end."""
    if BY_RUN not in rank.names:
        return False
    marks = rank.events[rank.events["kind"] == Kind.STEP]
    return bool((marks["name"] == rank.names.index(BY_RUN)).all())


def _calls_of_all(rank: RankTrace) -> np.ndarray:
    """Return the collectives of the communicators that have all ranks, in the order of calls."""
    size = rank.status.world_size
    of_all = np.array([len(group.members) == size for group in rank.groups], dtype=bool)
    calls = rank.events_of(Kind.COLLECTIVE)
    return np.asarray(calls[of_all[calls["group"]]])


def _signatures(rank: RankTrace, calls: np.ndarray) -> list[str]:
    """Return what the calls have in common on all ranks, as text."""
    equal = np.array([name in EQUAL_SIZES for name in rank.names], dtype=bool)
    amounts = np.where(equal[calls["name"]], calls["amount"], 0)
    ids = row_ids(calls["name"], calls["group"], calls["peer"], amounts)
    _, places, inverse = np.unique(ids, return_index=True, return_inverse=True)
    texts = [
        f"{rank.names[call['name']]} {rank.groups[call['group']].name} {call['peer']} {amount}"
        for call, amount in zip(calls[places], amounts[places], strict=True)
    ]
    return [texts[number] for number in inverse]


def mark_repetition(rank: RankTrace, repetition: Repetition) -> RankTrace | None:
    """Return the trace with a step for each repetition; None if their ends do not increase."""
    calls, (first, lasts) = _calls_of_all(rank), repetition
    ends = calls["end_ns"][lasts]
    before = calls["end_ns"][first - 1] if first else min(calls["begin_ns"][0], _begin_ns(rank))
    bounds = np.concatenate([[before], ends])
    if (np.diff(bounds.astype(np.int64)) <= 0).any():
        return None
    names = rank.names if BY_REPETITION in rank.names else (*rank.names, BY_REPETITION)
    events = rank.events[rank.events["kind"] != Kind.STEP].copy()
    events["step"] = np.searchsorted(ends, events["begin_ns"], side="right")
    steps = np.zeros(len(ends), events.dtype)
    steps["begin_ns"], steps["end_ns"], steps["step"] = bounds[:-1], ends, np.arange(len(ends))
    steps["kind"], steps["name"], steps["peer"] = Kind.STEP, names.index(BY_REPETITION), -1
    return dataclasses.replace(rank, events=np.concatenate([events, steps]), names=names)


def _begin_ns(rank: RankTrace) -> int:
    """Return when the program's first step began: at the end of MPI_Init."""
    marks = rank.events[rank.events["kind"] == Kind.STEP]
    return int(marks["begin_ns"].min(initial=2**63 - 1))
