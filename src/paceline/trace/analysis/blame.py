"""Stragglers: which ranks were late, in which steps, and why.

An all-reduce hides a straggler, because every rank takes equally long in it; `skew` shows it.

Among many ranks one is always first, so that all other ranks have some skew. A rank is therefore
judged by its excess: its skew minus the median skew of the other ranks. It is accused only if noise
would hardly bring so many late steps together.

The straggler's extra time is split by comparing it with the other ranks in the same steps: input
is data, time without a core is not_running, the rest is compute. Threads of a rank that share a
core wait for each other: the more the rank computes, the longer some of its threads are runnable
without running. So the time by which the rank's threads ran longer than other ranks' threads is
counted as compute first, and only the rest can be not_running.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.phases import RankPhases

_PASSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler(Record):
    """A rank that was late, with its step range and the cause.

    Attributes:
        rank: the global rank.
        cause: data, compute or not_running: where most of its extra time went.
        late_ms: median skew in the step range, milliseconds.
        first_step: first step of the range.
        last_step: last step of the range.
        others_wait: share of the time of these steps that the other ranks wait, 0 to 1.
    """

    rank: int
    cause: str
    late_ms: float
    first_step: int
    last_step: int
    others_wait: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BlameRules(Record):
    """Thresholds from which skew is reported rather than taken for noise.

    Attributes:
        min_late_s: smallest median excess that is reported, seconds.
        min_late_share: smallest median excess that is reported, as a share of the median step time;
            the larger of the two is the minimum size.
        min_steps: minimum number of steps in a step range.
        min_late_steps: minimum share of steps in the range whose excess is above the minimum size.
        min_signal: minimum ratio of the median excess in the range to its spread (scaled median
            absolute deviation) there.
        min_cost_share: minimum sum of the skew in the range, as a share of the time of the whole
            loop: a short disturbance by another process is real, but is not reported.
        max_chance: maximum probability that so many late steps lie together by chance, if late
            steps were as frequent as elsewhere in the run.
    """

    min_late_s: float = 0.001
    min_late_share: float = 0.1
    min_steps: int = 8
    min_late_steps: float = 0.8
    min_signal: float = 2.0
    min_cost_share: float = 0.02
    max_chance: float = 1e-3


def find_stragglers(
    ranks: Sequence[RankPhases], skew: np.ndarray, rules: BlameRules | None = None
) -> tuple[Straggler, ...]:
    """Return the ranks that were late, the costliest first; empty if no rank was late.

    Args:
        ranks: phases of each rank of the run.
        skew: skew of each rank in the steps that all ranks completed, from `skew_s`, shape (ranks,
            steps), seconds.
        rules: thresholds; with the defaults, the ordinary noise of a busy node is not reported.
    """
    rules = rules or BlameRules()
    steps = skew.shape[1]
    if len(ranks) < 2 or steps < rules.min_steps:
        return ()
    step_s = np.median(np.min([rank.step_s[:steps] for rank in ranks], axis=0))
    least_s = max(rules.min_late_s, rules.min_late_share * float(step_s))
    loop_s = float(np.min([rank.step_s[:steps].sum() for rank in ranks]))
    excess = excess_s(skew)
    is_late = excess > least_s
    found = []
    for i in range(len(ranks)):
        steps_late = late_steps(excess[i], least_s, rules)
        if steps_late is None or chance(is_late, i, steps_late) > rules.max_chance:
            continue
        first, last = steps_late
        cost = float(skew[i, first : last + 1].sum())
        if cost < rules.min_cost_share * loop_s:
            continue
        found.append((cost, _straggler(i, ranks, skew[i], first, last)))
    return tuple(straggler for _, straggler in sorted(found, key=lambda pair: -pair[0]))


def excess_s(skew: np.ndarray) -> np.ndarray:
    """Return each rank's skew minus the (lower) median skew of the other ranks, in each step.

    Argument and result have the shape (ranks, steps), with two or more ranks; seconds.
    """
    ordered = np.sort(skew, axis=0)
    middle = (len(skew) - 2) // 2  # index of the median once this rank's own value is left out
    usual = np.where(skew <= ordered[middle], ordered[middle + 1], ordered[middle])
    return np.asarray(skew - usual)


def chance(is_late: np.ndarray, i: int, step_range: tuple[int, int]) -> float:
    """Return a bound on the probability that noise gives rank `i` such a step range somewhere.

    Noise is assumed to make steps late at the rate that is seen outside the range. Then a range of
    n steps has a share s of late steps with a probability of at most exp(-n KL(s, rate)), for each
    rank and place of the range.
    Source: W. Hoeffding, Probability inequalities for sums of bounded random variables (1963), 2.1.

    Args:
        is_late: which steps are late, shape (ranks, steps).
        i: index of the rank in `is_late`.
        step_range: first and last step of its step range.
    """
    first, last = step_range
    count = last - first + 1
    inside = is_late[i, first : last + 1]
    outside = is_late.size - count
    rate = (int(is_late.sum()) - int(inside.sum()) + 1) / (outside + 2)
    share = float(inside.mean())
    if share <= rate:
        return 1.0
    divergence = share * math.log(share / rate)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - rate))
    return min(1.0, is_late.size * math.exp(-count * divergence))


def late_steps(excess: np.ndarray, least_s: float, rules: BlameRules) -> tuple[int, int] | None:
    """Return the first and last step of the range in which a rank is late, if there is one.

    The range maximises the sum of (excess - threshold). The excess is clipped at twice the
    threshold, so that one very late step cannot make a range. The threshold is half the median
    excess of all late steps, and never less than `least_s`, so that the range begins and ends where
    the skew does; a second pass uses the median excess inside the range instead, which noise does
    not dilute.
    Source: maximum subarray, J. Bentley, Programming Pearls (1984).

    Args:
        excess: excess of the rank in each step, shape (steps,), seconds.
        least_s: minimum size: a step is late if its excess is above it.
        rules: thresholds for the range.
    """
    above = excess[excess > least_s]
    if len(above) < rules.min_steps:
        return None
    typical = float(np.median(above))
    for _ in range(_PASSES):
        threshold = max(least_s, typical / 2)
        score = np.clip(excess, 0.0, 2 * threshold) - threshold
        first, last = _best_range(score)
        inside = excess[first : last + 1]
        typical = float(np.median(inside))
    middle = float(np.median(inside))
    spread = 1.4826 * float(np.median(np.abs(inside - middle)))
    if (
        last - first + 1 < rules.min_steps
        or middle < least_s
        or float(np.mean(inside > least_s)) < rules.min_late_steps
        or middle < rules.min_signal * spread
    ):
        return None
    return first, last


def _best_range(score: np.ndarray) -> tuple[int, int]:
    best, best_first, best_last = -np.inf, 0, 0
    running, first = 0.0, 0
    for i, value in enumerate(score.tolist()):
        if running <= 0:
            running, first = 0.0, i
        running += value
        if running > best:
            best, best_first, best_last = running, first, i
    return best_first, best_last


def _straggler(
    i: int, ranks: Sequence[RankPhases], skew: np.ndarray, first: int, last: int
) -> Straggler:
    steps = slice(first, last + 1)
    others = [rank for j, rank in enumerate(ranks) if j != i]
    extra = ranks[i].seconds[steps].mean(axis=0) - np.mean(
        [other.seconds[steps].mean(axis=0) for other in others], axis=0
    )
    data_s = float(extra[PHASES.index("input")])
    working = [PHASES.index(phase) for phase in ("copy", "forward", "backward", "optimizer")]
    working += [PHASES.index(name) for name in ("checkpoint", "evaluation", "host", "other")]
    rest_s = float(extra[working].sum())
    ran_s = float(
        ranks[i].running_s[steps].mean() - np.mean([other.running_s[steps] for other in others])
    )
    starved_s = float(
        ranks[i].not_running_s[steps].mean()
        - np.mean([other.not_running_s[steps] for other in others])
    )
    starved_s = max(0.0, min(starved_s, rest_s - max(0.0, ran_s)))
    by_cause = {"data": data_s, "compute": rest_s - starved_s, "not_running": starved_s}
    waiting = PHASES.index("waiting")
    shares = [
        other.seconds[steps, waiting].sum() / max(1e-12, other.step_s[steps].sum())
        for other in others
    ]
    return Straggler(
        rank=ranks[i].rank,
        cause=max(by_cause, key=lambda cause: by_cause[cause]),
        late_ms=1e3 * float(np.median(skew[steps])),
        first_step=first,
        last_step=last,
        others_wait=float(np.mean(shares)),
    )
