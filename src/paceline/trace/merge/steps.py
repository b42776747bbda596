"""Merges recorded step marks into the steps of the training loop.

A rank records a *mark* wherever a step may end (`collectors.torch_marks`): at each
`paceline.step()`; before the first of those, at each optimizer step; before the first optimizer
step, at each loader batch; and before the first batch, at each backward pass. For each rank, one
rule decides which marks end a step; the others lie within a step:

    paceline.step()      the script says it: each of its calls
    optimizer            each step of the optimizer
    optimizers in turn   the last step of each round of several optimizers, as in a GAN
    loader               no optimizer: each batch from a loader
    backward             no optimizer and no loader: each backward pass
    MPI_Pcontrol         an MPI program says it: each MPI_Pcontrol(1)
    repeated collectives an MPI program that does not (`repetition`)
    whole run            an MPI program without repetitions: from MPI_Init to MPI_Finalize

A round of several optimizers begins with each turn of the optimizer that began the first round::

    D G | D G | D G           a GAN: two steps of optimizers, one step of the loop
    D D D G | D D D G         critics that step several times on one batch, or without a loader
    D | D | D G | D | D | D G     the same with a new batch for each step of D: each batch is a step
    A | A | ... | A | B | B   one after the other: each step of an optimizer is a step

An optimizer that steps several times in a row before another has its turn takes these steps within
one round, unless each comes with a batch of its own, or there are too many of them (`REPEATS_MAX`).
An optimizer that has only one turn in the whole run takes no part in rounds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import (
    BY_BACKWARD,
    BY_BATCH,
    BY_OPTIMIZER,
    BY_PCONTROL,
    BY_REPETITION,
    BY_RUN,
    BY_SCRIPT,
    MAIN,
    NEXT,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.trace.format.files import RankTrace

REPEATS_MAX = 16  # steps of one optimizer in a row that may be part of a round


class StepRule(StrEnum):
    """What ends a step of the training loop; the values are those of ``result.json``."""

    SCRIPT = "paceline.step()"
    OPTIMIZER = "optimizer"
    OPTIMIZERS = "optimizers in turn"
    LOADER = "loader"
    BACKWARD = "backward"
    PCONTROL = "MPI_Pcontrol"
    REPETITION = "repeated collectives"
    RUN = "whole run"
    NONE = ""


# The strongest first: marks of other kinds end no step if there is one of this kind.
_RULES = {
    BY_SCRIPT: StepRule.SCRIPT,
    BY_OPTIMIZER: StepRule.OPTIMIZER,
    BY_BATCH: StepRule.LOADER,
    BY_BACKWARD: StepRule.BACKWARD,
    BY_PCONTROL: StepRule.PCONTROL,
    BY_REPETITION: StepRule.REPETITION,
    BY_RUN: StepRule.RUN,
}
_WORK = (Kind.FORWARD, Kind.EVALUATION, Kind.BACKWARD)


@dataclass(frozen=True, slots=True, eq=False)
class _Marks:
    """Where a step of one rank may end: its STEP events, and which are of the strongest kind.

    Attributes:
        rule: what the marks of this kind are.
        events: all marks, shape (marks,).
        ends: those of the strongest kind, shape (marks,).
        source_ids: id of the optimizer or loader that made each of these marks, shape (strongest,).
        has_batch: whether a loader gave a batch since the previous of these; empty unless the marks
            are optimizer steps.
    """

    rule: StepRule
    events: np.ndarray
    ends: np.ndarray
    source_ids: np.ndarray
    has_batch: np.ndarray


def join_steps(rank: RankTrace, has_batch: np.ndarray | None = None) -> RankTrace:
    """Return the trace with steps of the loop in place of its marks, and with `step_rule`.

    Args:
        rank: a trace.
        has_batch: what `shared_batches` found for it; None: what it knows by itself.
    """
    marks = _marks_of(rank)
    if marks is None:
        return rank
    if has_batch is not None:
        marks = dataclasses.replace(marks, has_batch=has_batch)
    return _join(rank, marks)


def shared_batches(ranks: Iterable[RankTrace]) -> list[np.ndarray | None]:
    """Return for each rank before which of its optimizer's steps a loader gave a batch.

    A batch that the loader of one rank gave may be for all of them: where the same optimizers
    stepped in the same order, ranks count the same steps whichever of them has the loader. The
    order is that of the rank with the most marks; the others may have ended before. None for ranks
    of which no optimizer ends the steps.
    """
    found = [
        (marks.source_ids, marks.has_batch)
        if marks is not None and marks.rule is StepRule.OPTIMIZER
        else None
        for marks in map(_marks_of, ranks)
    ]
    longest = max((own[0] for own in found if own), key=len, default=np.zeros(0))
    common = np.zeros(len(longest), dtype=bool)
    shared: list[np.ndarray | None] = []
    for own in found:
        if own is None:
            shared.append(None)
            continue
        source_ids, has_batch = own
        count = len(source_ids)
        if (source_ids == longest[:count]).all():
            view = common[:count]  # of what later ranks add, too
            view |= has_batch
            has_batch = view
        shared.append(has_batch)
    return shared


def _marks_of(rank: RankTrace) -> _Marks | None:
    """Return the marks of a rank; None without a step, or if damaged: `analysis.phases` says so."""
    marks = rank.events[rank.events["kind"] == Kind.STEP]
    if not len(marks) or (np.diff(marks["step"].astype(np.int64)) <= 0).any():
        return None
    rule, name = _rule_of(rank, marks)
    ends = marks["name"] == name
    is_optimizer = rule is StepRule.OPTIMIZER
    has_batch = _has_batch(rank, marks[ends]) if is_optimizer else np.zeros(0, dtype=bool)
    return _Marks(rule, marks, ends, marks["tag"][ends], has_batch)


def _join(rank: RankTrace, found: _Marks) -> RankTrace:
    rule, marks, ends = found.rule, found.events, found.ends.copy()
    if rule is StepRule.OPTIMIZER:
        last_of_round = round_ends(found.source_ids, found.has_batch)
        rule = rule if last_of_round.all() else StepRule.OPTIMIZERS
        ends[ends] = last_of_round
    elif rule is StepRule.LOADER:
        rank, marks, ends = _with_last_step(rank, marks, ends)
        ends &= _has_work(rank, marks)
        ends[ends] = _batch_ends(marks["tag"][ends])
    elif rule is StepRule.BACKWARD:
        rank, marks, ends = _with_last_step(rank, marks, ends)
    if ends.all() or not ends.any():
        return dataclasses.replace(rank, step_rule=rule.value)
    return dataclasses.replace(
        rank,
        events=_joined(rank, marks, ends),
        step_rule=rule.value,
        marks_within_steps=int((~ends).sum()),
    )


def _rule_of(rank: RankTrace, marks: np.ndarray) -> tuple[StepRule, int]:
    """Return the rule for the strongest kind of mark, and the number of that mark's name."""
    present = set(marks["name"].tolist())
    for name, rule in _RULES.items():
        if name in rank.names and rank.names.index(name) in present:
            return rule, rank.names.index(name)
    return StepRule.OPTIMIZER, int(marks["name"][0])


def round_ends(source_ids: np.ndarray, has_batch: np.ndarray) -> np.ndarray:
    """Return which of a sequence of optimizer steps end a step of the loop.

    >>> round_ends(np.array([1, 1, 2, 1, 1, 2]), np.zeros(6, dtype=bool)).astype(int).tolist()
    [0, 0, 1, 0, 0, 1]
    >>> round_ends(np.array([1, 1, 2, 1, 1, 2]), np.ones(6, dtype=bool)).astype(int).tolist()
    [1, 0, 1, 1, 0, 1]

    Args:
        source_ids: id of the optimizer that stepped, shape (marks,).
        has_batch: whether a loader gave a batch since the previous mark, shape (marks,).
    """
    count = len(source_ids)
    ends = np.ones(count, dtype=bool)
    if count < 2 or (source_ids == source_ids[0]).all():
        return ends
    repeats = np.concatenate([[False], source_ids[1:] == source_ids[:-1]])
    first = np.flatnonzero(~repeats)  # of each turn of one optimizer: one step, or several in a row
    owners, lengths = source_ids[first], np.diff(np.concatenate([first, [count]]))
    begins = np.zeros(count, dtype=bool)
    begins[first[_round_starts(owners)]] = True
    begins |= repeats & np.repeat(lengths > REPEATS_MAX, lengths)
    if len(np.unique(owners)) < len(owners) or lengths.max() > 1:  # else it may be one round
        names, turn_counts = np.unique(owners, return_counts=True)
        begins[first[np.isin(owners, names[turn_counts == 1])]] = True
    for owner in np.unique(owners):
        own = owners == owner
        again = repeats & (source_ids == owner)
        with_batch = again.any() and has_batch[again].mean() >= 0.5
        if own.sum() < 2 or with_batch or np.median(lengths[own]) > REPEATS_MAX:
            begins |= again  # each of its steps is one of the loop
            begins[first[own & (lengths > REPEATS_MAX)]] = True
    ends[:-1] = begins[1:]
    return ends


def _batch_ends(source_ids: np.ndarray) -> np.ndarray:
    """Return which batches end a step: each; if loaders alternate (zip), the last of each round.

    Args:
        source_ids: id of the loader that gave each batch, shape (marks,).
    """
    every = np.ones(len(source_ids), dtype=bool)
    alternate = len(source_ids) > 1 and float((source_ids[1:] != source_ids[:-1]).mean()) > 0.5
    return round_ends(source_ids, every) if alternate else every


def _round_starts(owners: np.ndarray) -> np.ndarray:
    """Return the turns with which a round begins: those of the optimizer that began the first.

    After its last turn the remaining optimizers form rounds of their own, by the same rule.
    """
    starts: list[np.ndarray] = []
    first = 0
    while first < len(owners):
        turns = first + np.flatnonzero(owners[first:] == owners[first])
        starts.append(turns)
        first = int(turns[-1]) + 1
        rest = owners[first:]
        if len(set(rest.tolist())) == len(rest):  # what is left completes the last round
            break
    return np.concatenate(starts)


def _has_batch(rank: RankTrace, marks: np.ndarray) -> np.ndarray:
    """Return for each mark whether a loader gave a batch since the mark before."""
    return _between(rank, marks, _named(rank, NEXT, Kind.INPUT))


def _has_work(rank: RankTrace, marks: np.ndarray) -> np.ndarray:
    """Return for each mark whether a module was called since the mark before; all if none is."""
    on_main = rank.events["location"] == MAIN
    found = _between(rank, marks, on_main & np.isin(rank.events["kind"], _WORK))
    return found if found.any() else np.ones(len(marks), dtype=bool)


def _named(rank: RankTrace, name: str, kind: Kind) -> np.ndarray:
    if name not in rank.names:
        return np.zeros(len(rank.events), dtype=bool)
    return np.asarray(
        (rank.events["kind"] == kind) & (rank.events["name"] == rank.names.index(name))
    )


def _between(rank: RankTrace, marks: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return for each mark whether one of the chosen events ended since the mark before."""
    at = np.searchsorted(marks["end_ns"], rank.events["end_ns"][chosen], side="left")
    found = np.zeros(len(marks) + 1, dtype=bool)
    found[at] = True
    return found[:-1]


def _with_last_step(
    rank: RankTrace, marks: np.ndarray, ends: np.ndarray
) -> tuple[RankTrace, np.ndarray, np.ndarray]:
    """Return the arguments with the step that was open when the loop was left, if it has work.

    A batch ends when the next one is asked for: a loop that is left early asks for none.
    """
    last = marks[-1]
    events = rank.events
    open_work = events[(events["location"] == MAIN) & np.isin(events["kind"], _WORK)]
    open_work = open_work[open_work["begin_ns"] >= last["end_ns"]]
    if not len(open_work):
        return rank, marks, ends
    step = np.array([last], events.dtype)
    step["begin_ns"], step["end_ns"] = last["end_ns"], open_work["end_ns"].max()
    step["step"] = last["step"] + 1
    rank = dataclasses.replace(rank, events=np.concatenate([events, step]))
    return rank, np.concatenate([marks, step]), np.concatenate([ends, [True]])


def _joined(rank: RankTrace, marks: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the rank's events with their steps renumbered, and one STEP event for each step.

    The counters of the marks that are joined add up. A step of which a mark was lost, because a
    buffer was full, gets no STEP event: its duration is not known.
    """
    events = rank.events.copy()
    end_numbers = marks["step"][ends].astype(np.int64)
    events["step"] = np.searchsorted(end_numbers, events["step"])
    last = np.flatnonzero(ends)
    first = np.concatenate([[0], last[:-1] + 1])
    begun = np.concatenate([[-1], end_numbers[:-1]])
    recorded = last - first + 1 == end_numbers - begun
    is_mark = events["kind"] == Kind.STEP
    rows = np.flatnonzero(is_mark)
    keep = ~is_mark
    keep[rows[last[recorded]]] = True
    events["begin_ns"][rows[last]] = marks["begin_ns"][first]
    is_counter = events["kind"] == Kind.COUNTER
    at_mark = is_counter & np.isin(events["end_ns"], marks["end_ns"])
    rows = np.flatnonzero(at_mark)
    keys = events["name"][rows].astype(np.int64) << 32 | events["step"][rows]
    _, place, inverse = np.unique(keys[::-1], return_index=True, return_inverse=True)
    latest = rows[::-1][place]
    sums = np.zeros(len(place), dtype=np.uint64)
    np.add.at(sums, inverse, events["amount"][rows[::-1]])
    events["amount"][latest] = sums
    keep[rows] = False
    keep[latest] = True
    return np.asarray(events[keep])
