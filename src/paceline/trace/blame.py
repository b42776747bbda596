"""Stragglers: who was late, when, and why.

All-reduce hides it, because every rank takes equally long there (`skew` brings it to light).

Among many ranks somebody is always first, so that all others have some skew. A rank is therefore
accused for its excess over what is usual among the others, and only if chance would not bring so
many late steps together.

The straggler's extra time is split by comparing it with the other ranks in the same steps: input
is data, time without a core is not_running, the rest is compute. A rank whose threads share a core
queues behind itself: the more it computes, the longer some of its threads are runnable. So what
its threads ran longer than those of others counts as compute first.
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

    from paceline.trace.phases import RankPhases

_PASSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler(Record):
    """A rank that was late, in which steps, and why.

    Attributes:
        rank: the global rank.
        cause: data, compute or not_running: where most of its extra time went.
        late_ms: median skew in the step range, milliseconds.
        first_step: first step of the range.
        last_step: last step of the range.
        others_wait: share of these steps that the other ranks wait, 0 to 1.
    """

    rank: int
    cause: str
    late_ms: float
    first_step: int
    last_step: int
    others_wait: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BlameRules(Record):
    """When skew is worth an accusation rather than noise.

    Attributes:
        min_late_s: less is never reported.
        min_late_share: neither is less than this share of the median step.
        min_steps: a step range is at least this long.
        min_late_steps: this share of the range's steps is late.
        min_signal: median excess in the range, over its median absolute deviation there.
        min_cost_share: the range's skew adds up to at least this share of the whole loop: a
            neighbour that takes a core for a blink is real, and not worth a name.
        max_chance: probability that so many late steps lie together by chance, if late steps were
            strewn as they are elsewhere in the run.
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
    """Return the ranks that were late, the costliest first; empty when nobody was.

    Args:
        ranks: the run's phases.
        skew: from `skew_s`, over the steps that all ranks completed, shape (ranks, steps).
        rules: thresholds; the defaults keep quiet about what a busy node does by itself.
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
    """Return by how much each rank's skew exceeds what is usual among the others, in each step.

    Usual is the (lower) median of the other ranks. Shapes are (ranks, steps), of two or more ranks.
    """
    ordered = np.sort(skew, axis=0)
    middle = (len(skew) - 2) // 2  # of the others, were they without this rank's own value
    usual = np.where(skew <= ordered[middle], ordered[middle + 1], ordered[middle])
    return np.asarray(skew - usual)


def chance(is_late: np.ndarray, i: int, step_range: tuple[int, int]) -> float:
    """Return a bound on the probability that noise gives rank `i` such a step range somewhere.

    Noise would make steps late at the rate that is seen outside the range; that a range of n
    steps then has a share s of late ones has a probability of at most exp(-n KL(s, rate)), for
    each rank and place of the range.
    Source: W. Hoeffding, Probability inequalities for sums of bounded random variables (1963), 2.1.

    Args:
        is_late: which steps are late, shape (ranks, steps).
        i: the rank.
        step_range: its first and last step.
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

    The range is the one that maximises the sum of (excess - threshold), with the excess cut at
    a few thresholds so that a single hiccup cannot make a range. The threshold is half of what
    is typical for late steps, so that the edges fall where the skew begins and ends; a second pass
    takes what is typical from the range itself, where noise does not dilute it.
    Source: maximum subarray, J. Bentley, Programming Pearls (1984).
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
    working += [PHASES.index("checkpoint"), PHASES.index("other")]
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
