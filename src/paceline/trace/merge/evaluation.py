"""Finds evaluations: sequences of forward passes that train nothing.

A forward pass is recorded with two flags: gradients were disabled, the module was in evaluation
mode. The flags alone do not make an evaluation. A step may run a teacher, a generator or a target
network without gradients to train something else with the result. So the passes of a sequence,
between two pieces of training, are judged together. It is an evaluation if one of these holds:

    it takes batches of its own: a loader is asked between its passes, or after the last of them
    nothing is trained after it
    it has several passes, or its only pass is one without gradients and in evaluation mode of a
    module that is trained elsewhere; and such sequences come in at most half of the steps

The last one is for evaluations without a loader. What comes in each step makes something to train
with: pseudo labels, or the experience of reinforcement learning.

An evaluation lasts from its first batch or pass to its last, with all that is between: one event of
kind EVALUATION and name `EVALUATION_SPAN`, cut where a step ends. Time after the last step counts
for that step, if an evaluation is in it: it evaluates what that step made.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import (
    EVALUATION_MODE,
    EVALUATION_SPAN,
    LOSS,
    MAIN,
    WITHOUT_GRADIENTS,
    Kind,
)

if TYPE_CHECKING:
    from paceline.trace.format.files import RankTrace

_PASSES = (Kind.FORWARD, Kind.EVALUATION)
_SHAPING = (Kind.INPUT, Kind.FORWARD, Kind.EVALUATION, Kind.BACKWARD, Kind.OPTIMIZER)
_FLAGS = WITHOUT_GRADIENTS | EVALUATION_MODE
_ZERO = np.zeros(1, np.uint64)  # a list [0] is signed: joined to times it makes floats


def find_evaluations(rank: RankTrace) -> RankTrace:
    """Return the trace of a rank with an event for each evaluation.

    Passes that were taken for an evaluation when they were recorded, and are part of training,
    become forward passes.
    """
    is_pass = np.isin(rank.events["kind"], _PASSES) & (rank.events["location"] == MAIN)
    if not (is_pass & (rank.events["flags"] & _FLAGS != 0)).any():
        return rank
    events = rank.events.copy()
    spans = _evaluations(rank)
    events["kind"][events["kind"] == Kind.EVALUATION] = Kind.FORWARD
    inside = in_spans(events["begin_ns"], spans) & is_pass
    events["kind"][inside] = Kind.EVALUATION
    _extend_last_step(events, spans)
    names = rank.names
    if EVALUATION_SPAN not in names:
        names = (*names, EVALUATION_SPAN)
    cut = _cut(spans, events[events["kind"] == Kind.STEP])
    added = np.zeros(len(cut), events.dtype)
    added["begin_ns"], added["end_ns"], added["step"] = cut["begin_ns"], cut["end_ns"], cut["step"]
    added["kind"], added["name"], added["peer"] = Kind.EVALUATION, names.index(EVALUATION_SPAN), -1
    return dataclasses.replace(rank, events=np.concatenate([events, added]), names=names)


SPAN = np.dtype([("begin_ns", "<u8"), ("end_ns", "<u8"), ("step", "<u4")])


def evaluation_spans(rank: RankTrace) -> np.ndarray:
    """Return the evaluations of a rank, array of `SPAN`, ordered by begin time."""
    if EVALUATION_SPAN not in rank.names:
        return np.zeros(0, SPAN)
    events = rank.events_of(Kind.EVALUATION)
    events = events[events["name"] == rank.names.index(EVALUATION_SPAN)]
    return np.asarray(events[["begin_ns", "end_ns", "step"]].astype(SPAN))


def in_spans(times_ns: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return which of the times are within one of the spans, which are ordered and disjoint."""
    return np.asarray(span_of(times_ns, spans) >= 0)


def span_of(times_ns: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return the index of the span that each time is within, -1 for none; as `in_spans`."""
    at = np.searchsorted(spans["begin_ns"], times_ns, side="right") - 1
    inside = at >= 0
    inside[inside] = times_ns[inside] < spans["end_ns"][at[inside]]
    return np.where(inside, at, -1)


def _evaluations(rank: RankTrace) -> np.ndarray:
    """Return the evaluations as they lie between pieces of training."""
    events = _outermost(rank)
    passes, kinds = np.isin(events["kind"], _PASSES), events["kind"]
    grad = events["flags"] & WITHOUT_GRADIENTS == 0
    eval_mode = events["flags"] & EVALUATION_MODE != 0
    untrained = passes & ~(_feeds_backward(rank, events) | (grad & ~eval_mode))
    trained = np.unique(events["tag"][passes & ~untrained & (events["tag"] > 0)])
    strong = untrained & ~grad & eval_mode & np.isin(events["tag"], trained)
    asks = kinds == Kind.INPUT
    loaders = _training_loaders(events, passes, untrained)
    chosen: list[tuple[int, int]] = []
    rare: list[tuple[int, int]] = []
    for rows in _runs(asks | untrained):
        own = rows[untrained[rows]]
        if not len(own):
            continue
        first, last = own[0], own[-1]
        asked = rows[asks[rows]]
        between = bool(((asked > first) & (asked < last)).any())
        after = bool((asked > last).any()) and bool(eval_mode[own].all())
        at_end = rows[-1] == len(events) - 1
        span = _span(events, rows, own, loaders)
        if between or after or at_end:
            chosen.append(span)
        elif len(own) > 1 or strong[own].any():
            rare.append(span)
    steps = max(1, int((rank.events["kind"] == Kind.STEP).sum()))
    if len(rare) <= 0.5 * steps:
        chosen += rare
    result = np.zeros(len(chosen), SPAN)
    for i, (begin, end) in enumerate(sorted(chosen)):
        result[i] = (begin, end, 0)
    return result


def _runs(chosen: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each sequence of chosen events without a gap."""
    rows = np.flatnonzero(chosen)
    return np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)


def _outermost(rank: RankTrace) -> np.ndarray:
    """Return the events that shape a loop and that nothing encloses, by begin time."""
    events = rank.events_of(*_SHAPING)
    events = events[events["location"] == MAIN]
    events = events[np.lexsort((-events["end_ns"].astype(np.int64), events["begin_ns"]))]
    ended = np.maximum.accumulate(events["end_ns"]) if len(events) else events["end_ns"]
    before = np.concatenate([_ZERO, ended[:-1]])
    return np.asarray(events[events["begin_ns"] >= before[: len(events)]])


def _feeds_backward(rank: RankTrace, events: np.ndarray) -> np.ndarray:
    """Return which passes in evaluation mode, with gradients, come right before a backward pass."""
    soft = np.isin(events["kind"], _PASSES) & (events["flags"] & _FLAGS == EVALUATION_MODE)
    count = len(events)
    following = np.where(soft, count, np.arange(count))
    following = np.minimum.accumulate(following[::-1])[::-1]
    following = np.concatenate([following[1:], [count]])
    is_backward = events["kind"] == Kind.BACKWARD
    if LOSS in rank.names:
        is_backward |= events["name"] == rank.names.index(LOSS)
    return np.asarray(soft & np.concatenate([is_backward, [False]])[following])


def _training_loaders(events: np.ndarray, passes: np.ndarray, untrained: np.ndarray) -> np.ndarray:
    """Return the numbers of the loaders whose batches mostly go to passes that train."""
    rows = np.flatnonzero((events["kind"] == Kind.INPUT) | passes)
    used = np.flatnonzero(~passes[rows[:-1]] & passes[rows[1:]])
    loaders, which = np.unique(events["tag"][rows[used]], return_inverse=True)
    counts = np.bincount(which, minlength=len(loaders))
    untrained_counts = np.bincount(which, untrained[rows[used + 1]], minlength=len(loaders))
    return np.asarray(loaders[2 * untrained_counts <= counts])


def _span(
    events: np.ndarray, rows: np.ndarray, own: np.ndarray, loaders: np.ndarray
) -> tuple[int, int]:
    """Return begin and end of an evaluation with its input.

    Args:
        events: the outermost events.
        rows: of the run: requests for batches, and passes.
        own: those of `rows` that are passes.
        loaders: numbers of the loaders that give batches for training.
    """
    asked = rows[events["kind"][rows] == Kind.INPUT]
    before, after = asked[asked < own[0]], asked[asked > own[-1]]
    begin, end = int(events["begin_ns"][own[0]]), int(events["end_ns"][own[-1]])
    if len(before):
        loader = events["tag"][before[-1]]
        same = before[events["tag"][before] == loader]
        first = before[-1] if loader in loaders else same[0]
        begin = int(events["begin_ns"][first])
        same = after[events["tag"][after] == loader]
        if len(same) and loader not in loaders:
            end = int(events["end_ns"][same[-1]])
    return begin, end


def _extend_last_step(events: np.ndarray, spans: np.ndarray) -> None:
    """Let the last step end with the evaluation that follows it, if there is one."""
    rows = np.flatnonzero(events["kind"] == Kind.STEP)
    if not len(rows) or not len(spans):
        return
    last, end_ns = rows[-1], spans["end_ns"][-1]
    if end_ns > events["end_ns"][last]:
        step = events["step"][last]
        events["step"][(events["step"] > step) & (events["end_ns"] <= end_ns)] = step
        events["end_ns"][last] = end_ns


def _cut(spans: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the spans cut where steps end, each part with its step."""
    ends = steps["end_ns"]
    first = np.searchsorted(ends, spans["begin_ns"], side="right")
    last = np.searchsorted(ends, spans["end_ns"], side="left")
    counts = last - first + 1
    owner = np.repeat(np.arange(len(spans)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
    parts = np.zeros(len(owner), SPAN)
    bounds = np.concatenate([_ZERO, ends])
    parts["begin_ns"] = np.maximum(spans["begin_ns"][owner], bounds[place])
    limit = np.concatenate([ends, [np.iinfo(np.uint64).max]]).astype(np.uint64)
    parts["end_ns"] = np.minimum(spans["end_ns"][owner], limit[place])
    numbers = np.concatenate([steps["step"], [int(steps["step"].max(initial=0)) + 1]])
    parts["step"] = numbers[place]
    return parts
