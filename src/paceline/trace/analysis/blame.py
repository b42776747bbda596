"""Stragglers: which ranks were late, in which steps, in which shape, and why.

An all-reduce hides a straggler, because every rank takes equally long in it; `skew` shows it.

Among many ranks one is always first, so that all other ranks have some skew. A rank is therefore
judged by its excess: its skew minus the median skew of the other ranks, which is noise around zero
if no rank is slower than the others.

On a busy node most of that noise is time without a core, which the kernel counts for each step. The
excess is split into the part that this time explains and the rest; `patterns` looks for a shape in
both. A shape in the first part is a rank whose core another process takes; a neighbour that takes a
core now and then so accuses nobody of computing longer. What is found in the rest has one of the
other causes, see `causes`.

A delay in a few steps is no pattern, and no proof that the rank is slow. Where it costs much of the
loop, for example as one rank evaluates alone, it is named as what happened: shape `rare`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.record import Record
from paceline.trace.analysis.causes import main_cause, place_between_phases
from paceline.trace.analysis.patterns import find_pattern
from paceline.trace.analysis.shapes import Pattern, PatternRules, rare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.trace.analysis.counters import StepCounters
    from paceline.trace.analysis.phases import RankPhases

_WAITING = PHASES.index("waiting")
_PLACED = ("compute", "blocked")
_OTHERS = 32  # ranks with which the episodes of a rank are compared, at most
_RARE_STEPS = 3.0  # median steps by which a rank is late in a rare delay, at least
_RARE_COST_SHARE = 0.1  # of the loop, that rare delays of a rank cost, at least
_FURTHER_SHARE = 0.5  # cost of a rank's second pattern, compared with its first, to be reported too


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler(Record):
    """A rank that was late, with its step range, the shape of its delay and the cause.

    Attributes:
        rank: the global rank.
        cause: where most of its extra time went: data, compute, slow_core, blocked, stopped,
            not_running, checkpoint, evaluation, compilation or gc.
        late_ms: median skew in its late steps, milliseconds.
        first_step: first step of the range.
        last_step: last step of the range.
        others_wait: share of the time of the late steps that the other ranks wait, 0 to 1.
        shape: persistent (late in most steps of the range), periodic (in every `period_steps`-th),
            drifting (later by `slope_ms_per_step` in each step), intermittent (in episodes
            without a rhythm), recurring (in blocks of some `block_steps` steps), or rare (very
            late in a few steps).
        period_steps: steps from one late step, or the beginning of a block, to the next; 0 if there
            is no rhythm.
        slope_ms_per_step: milliseconds by which the delay grows per step; 0 if not drifting.
        late_share: share of the steps of the range in which it was late, 0 to 1.
        confidence: 1 minus the p-value, 0 to 1; the p-value is the probability that noise alone
            produces such a pattern in some rank of the run, and falls with the number of steps.
            1 for rare delays, which are no pattern but what happened. 0 in results of Paceline
            versions that did not say.
        block_steps: late steps on end, in the median; 0 if not recurring.
        place: the line of the script (``train.py:12``) or the function between phases where most of
            the delay arises, if the cause is compute or blocked; else empty.
    """

    rank: int
    cause: str
    late_ms: float
    first_step: int
    last_step: int
    others_wait: float
    shape: str = "persistent"
    period_steps: int = 0
    slope_ms_per_step: float = 0.0
    late_share: float = 1.0
    confidence: float = 0.0
    block_steps: int = 0
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlameRules(Record):
    """Limits from which a delay is reported rather than taken for noise.

    Attributes:
        min_late_s: smallest delay with which a step counts as late, seconds.
        min_late_share: the same as a share of the median step time; the larger of the two counts.
        min_late_steps: minimum share of late steps in a range, or among every k-th step.
        min_cost_share: minimum sum of the delay, as a share of the time of the whole loop: a
            short disturbance by another process is real, but is not reported.
        max_p_value: largest p-value: the probability that noise alone produces such a pattern in
            some rank of the run.
    """

    version: ClassVar[int] = 3
    min_late_s: float = 0.0003
    min_late_share: float = 0.05
    min_late_steps: float = 0.65
    min_cost_share: float = 0.03
    max_p_value: float = 0.01

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 had limits of other tests, which say nothing about these.

        Version 2 called `max_p_value` max_chance.
        """
        if from_version == 1:
            return {}
        if "max_chance" in data:
            data["max_p_value"] = data.pop("max_chance")
        return data


def find_stragglers(
    ranks: Sequence[RankPhases],
    counters: Sequence[StepCounters],
    skew: np.ndarray,
    rules: BlameRules | None = None,
) -> tuple[Straggler, ...]:
    """Return the ranks that were late, the costliest first; empty if no rank was late.

    Args:
        ranks: phases of each rank of the run.
        counters: counters of each rank, in the same order.
        skew: skew of each rank in the steps that all ranks completed, from `skew_s`, shape (ranks,
            steps), seconds.
        rules: limits; with the defaults, the ordinary noise of a busy node is not reported.
    """
    rules = rules or BlameRules()
    steps = skew.shape[1]
    if len(ranks) < 2 or steps == 0:
        return ()
    late_threshold_s, least_cost_s = _limits_s(ranks, steps, rules)
    total = excess_s(skew)
    own = without_starvation_s(total, excess_s(_not_running_s(counters, steps)))
    found: list[tuple[float, Straggler]] = []
    seen: set[int] = set()  # ranks with a pattern that more cores would not cure
    explained = np.zeros(skew.shape, dtype=bool)
    for i, pattern, is_own in _patterns(total, own, late_threshold_s, least_cost_s, rules):
        series = own if is_own else total
        cost_s = float(np.sum(series[i], where=pattern.late))
        late_s = float(np.sum(total[i], where=pattern.late | _next(pattern.late)))
        if cost_s < least_cost_s or late_s < cost_s / 2:
            continue
        delay_s = cost_s / int(pattern.late.sum())
        cause = main_cause(i, ranks, counters, pattern.late, starved=not is_own, delay_s=delay_s)
        if cause is None:
            continue
        if is_own:
            seen.add(i)
        elif i in seen and cause != "not_running":
            continue  # the same delay, seen through more noise
        found.append((cost_s, _straggler(i, ranks, skew[i], pattern, cause)))
        explained[i] |= pattern.late | _next(pattern.late)
    for i, pattern, is_own in _rare(total, own, explained, ranks):
        cost_s = float(np.sum(total[i], where=pattern.late))
        delay_s = cost_s / int(pattern.late.sum())
        cause = main_cause(i, ranks, counters, pattern.late, starved=not is_own, delay_s=delay_s)
        if cause is not None:
            found.append((cost_s, _straggler(i, ranks, skew[i], pattern, cause)))
    found.sort(key=lambda pair: -pair[0])
    return tuple(_without_echoes(found))


def _limits_s(ranks: Sequence[RankPhases], steps: int, rules: BlameRules) -> tuple[float, float]:
    """Return the smallest delay of a late step, and of a straggler in all its steps, seconds."""
    shortest = np.min([rank.step_s[:steps] for rank in ranks], axis=0)
    late_threshold_s = max(rules.min_late_s, rules.min_late_share * float(np.median(shortest)))
    loop_s = float(np.min([rank.step_s[:steps].sum() for rank in ranks]))
    return late_threshold_s, rules.min_cost_share * loop_s


def _not_running_s(counters: Sequence[StepCounters], steps: int) -> np.ndarray:
    """Return each rank's time without a core, shape (ranks, steps); 0 if traces do not say."""
    if not all(rank.known for rank in counters):
        return np.zeros((len(counters), steps))
    return np.array([rank.not_running_s[:steps] for rank in counters])


def excess_s(values: np.ndarray) -> np.ndarray:
    """Return each rank's value minus the median value of the other ranks, in each step.

    Argument and result have the shape (ranks, steps), with two or more ranks; seconds.
    """
    count = len(values)
    ordered = np.sort(values, axis=0)
    lower, upper = (count - 2) // 2, (count - 1) // 2  # of the others, in their order

    def of_others(place: int) -> np.ndarray:
        """Return the others' value at a place in their order: one further, past the rank's own."""
        past = values <= ordered[place]
        return np.asarray(np.where(past, ordered[place + 1], ordered[place]))

    return np.asarray(values - (of_others(lower) + of_others(upper)) / 2)


def without_starvation_s(total: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Return the excess skew without the excess time without a core; all of shape (ranks, steps).

    Steps end with an optimizer step, skew with a sync: time without a core after the sync of a step
    makes the rank late in the next step. What was so taken off one step and is too much in the next
    is moved there.
    """
    rest = total - without
    here, later = rest[:, :-1], rest[:, 1:]
    moved = np.minimum(np.abs(without[:, :-1]), np.minimum(np.abs(here), np.abs(later)))
    misplaced = (here * later < 0) & (here * without[:, :-1] < 0)
    moved = np.where(misplaced, np.copysign(moved, without[:, :-1]), 0.0)
    rest[:, :-1] += moved
    rest[:, 1:] -= moved
    return np.asarray(rest)


def _next(late: np.ndarray) -> np.ndarray:
    """Return the steps after late steps."""
    return np.asarray(np.concatenate([[False], late[:-1]]))


def _patterns(
    total: np.ndarray,
    own: np.ndarray,
    late_threshold_s: float,
    least_cost_s: float,
    rules: BlameRules,
) -> Iterator[tuple[int, Pattern, bool]]:
    """Yield each pattern with its rank, and whether it was found without time without a core.

    Where the traces do not say when threads had no core, `own` and `total` are the same.
    """
    limits = PatternRules(
        late_threshold_s=late_threshold_s,
        min_late_steps=rules.min_late_steps,
        max_p_value=rules.max_p_value,
        series=2 * len(total),
    )
    known = not np.array_equal(own, total)
    for series, is_own in ((own, True), (total, False))[0 if known else 1 :]:
        late_s = np.sum(series, axis=1, where=series > late_threshold_s)
        for i in np.flatnonzero(late_s >= least_cost_s).tolist():
            others = np.delete(series, i, axis=0)
            others = others[:: -(-len(others) // _OTHERS)]
            pattern = find_pattern(series[i], others, limits)
            if pattern is not None:
                yield i, pattern, is_own


def _rare(
    total: np.ndarray, own: np.ndarray, explained: np.ndarray, ranks: Sequence[RankPhases]
) -> Iterator[tuple[int, Pattern, bool]]:
    """Yield the rare delays of each rank that cost much, as `_patterns` does.

    Args:
        total: excess skew, shape (ranks, steps), seconds.
        own: the same without time without a core.
        explained: the steps in which a pattern was found for a rank, or the next; same shape.
        ranks: phases of each rank.
    """
    step_s = np.min([rank.step_s[: total.shape[1]] for rank in ranks], axis=0)
    threshold_s = _RARE_STEPS * float(np.median(step_s))
    for i in range(len(total)):
        for series, is_own in ((own, True), (total, False)):
            pattern = rare(np.where(explained[i], 0.0, series[i]), threshold_s)
            if pattern is None:
                continue
            cost_s = float(np.sum(series[i], where=pattern.late))
            if cost_s >= _RARE_COST_SHARE * float(ranks[i].step_s[: len(step_s)].sum()):
                yield i, pattern, is_own
                break


def _straggler(
    i: int, ranks: Sequence[RankPhases], skew: np.ndarray, pattern: Pattern, cause: str
) -> Straggler:
    steps = np.flatnonzero(pattern.late)
    shares = [
        rank.seconds[steps, _WAITING].sum() / max(1e-12, rank.step_s[steps].sum())
        for j, rank in enumerate(ranks)
        if j != i
    ]
    count = pattern.last - pattern.first + 1
    return Straggler(
        rank=ranks[i].rank,
        cause=cause,
        late_ms=1e3 * float(np.median(skew[steps])),
        first_step=pattern.first,
        last_step=pattern.last,
        others_wait=float(np.mean(shares)),
        shape=pattern.shape,
        period_steps=pattern.period,
        slope_ms_per_step=1e3 * pattern.slope_s,
        late_share=len(steps) / count,
        confidence=1.0 - pattern.p_value,
        block_steps=pattern.block,
        place=place_between_phases(i, ranks, pattern.late) if cause in _PLACED else "",
    )


def _without_echoes(found: list[tuple[float, Straggler]]) -> list[Straggler]:
    """Return the stragglers without what only accompanies a rank's costliest pattern."""
    costliest: dict[int, float] = {}
    kept = []
    for cost_s, straggler in found:
        if cost_s >= _FURTHER_SHARE * costliest.setdefault(straggler.rank, cost_s):
            kept.append(straggler)
    return kept
