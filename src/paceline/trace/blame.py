"""Who was late, when, and why: all-reduce hides it, because every rank takes equally long there.

A rank's own time at a collective is the time since the last moment at which it was synchronised
with the others, without what it spent blocked in one-way operations since. Its lateness is its
own time minus the smallest own time among the ranks. Judging by arrival alone would accuse the
wrong rank: a broadcast makes its receivers as late as its root, and they carry that delay into
the next all-reduce.

Among many ranks somebody is always first, so that all others are a little late. A rank is
therefore accused for its excess over what is usual among the others, and only if chance would not
bring so many late steps together.

The late rank's extra time is split by comparing it with the other ranks in the same steps: input
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
from paceline.trace.arrivals import (
    Arrival,
    Blocked,
    Encounters,
    Key,
    encounters,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.merge import Trace
    from paceline.trace.phases import RankPhases

_LOOKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler(Record):
    """A rank that was late, in which steps, and why.

    Attributes:
        rank: the late rank.
        cause: data, compute or not_running: where most of its extra time went.
        late_ms: median lateness of the window's steps, milliseconds.
        first_step: first step of the window.
        last_step: last step of the window.
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
    """When lateness is worth an accusation rather than noise.

    Attributes:
        min_late_s: less is never reported.
        min_late_share: neither is less than this share of the median step.
        min_steps: a window is at least this long.
        min_late_steps: this share of the window's steps is late.
        min_signal: median excess in the window, over its median absolute deviation there.
        min_cost_share: the window's lateness adds up to at least this share of the whole loop: a
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


def lateness_s(trace: Trace, steps: int, met: Encounters | None = None) -> np.ndarray:
    """Return each rank's lateness in each step, shape (ranks, steps), seconds.

    A step may hold several times at which ranks synchronise; their latenesses add up, since after
    each of them all start equal. A step without a synchronising collective counts as 0.
    """
    met = met or encounters(trace)
    own = [
        _own_times_ns(mine, waits) for mine, waits in zip(met.arrivals, met.blocked, strict=True)
    ]
    result = np.zeros((len(own), steps))
    worst: dict[tuple[int, int, int], float] = {}  # by rank, step, stretch
    for key in met.meetings:
        present = [i for i, mine in enumerate(own) if key in mine]
        if len(present) < 2:
            continue
        fastest = min(own[i][key][0] for i in present)
        for i in present:
            own_ns, stretch = own[i][key]
            place = (i, met.arrivals[i][key].step, stretch)
            worst[place] = max(worst.get(place, 0.0), (own_ns - fastest) / 1e9)
    for (i, step, _), late in worst.items():
        if step < steps:
            result[i, step] += late
    return result


def _own_times_ns(mine: dict[Key, Arrival], waits: Sequence[Blocked]) -> dict[Key, tuple[int, int]]:
    """Return the rank's own time at each synchronising collective, and the stretch it is in.

    A stretch begins where the rank was last synchronised; before the first time there is none.
    """
    waits = sorted(waits, key=lambda wait: wait.begin_ns)
    own: dict[Key, tuple[int, int]] = {}
    reference = blocked_since = stretch = at = 0
    for key, arrival in mine.items():
        while at < len(waits) and waits[at].end_ns <= arrival.issue_ns:
            wait = waits[at]
            at += 1
            if wait.synchronises:
                reference, blocked_since, stretch = wait.end_ns, 0, stretch + 1
            else:
                blocked_since += wait.end_ns - wait.begin_ns
        if arrival.synchronises and stretch:
            own[key] = (arrival.issue_ns - reference - blocked_since, stretch)
    return own


def blame(
    trace: Trace,
    ranks: tuple[RankPhases, ...],
    rules: BlameRules | None = None,
    *,
    late_s: np.ndarray | None = None,
) -> tuple[Straggler, ...]:
    """Return the ranks that were late, the costliest first; empty when nobody was.

    Args:
        trace: the run.
        ranks: its phases, from `phases(trace)`.
        rules: thresholds; the defaults keep quiet about what a busy node does by itself.
        late_s: from `lateness_s` over the steps that all ranks completed, where it is known.
    """
    rules = rules or BlameRules()
    steps = min((one.steps for one in ranks), default=0)
    if len(ranks) < 2 or steps < rules.min_steps:
        return ()
    late = lateness_s(trace, steps) if late_s is None else late_s
    step_s = np.median(np.min([one.step_s[:steps] for one in ranks], axis=0))
    least_s = max(rules.min_late_s, rules.min_late_share * float(step_s))
    loop_s = float(np.min([one.step_s[:steps].sum() for one in ranks]))
    excess = excess_s(late)
    is_late = excess > least_s
    found = []
    for i in range(len(ranks)):
        window = late_window(excess[i], least_s, rules)
        if window is None or chance(is_late, i, window) > rules.max_chance:
            continue
        first, last = window
        cost = float(late[i, first : last + 1].sum())
        if cost < rules.min_cost_share * loop_s:
            continue
        found.append((cost, _straggler(i, ranks, late[i], first, last)))
    return tuple(one for _, one in sorted(found, key=lambda pair: -pair[0]))


def excess_s(late_s: np.ndarray) -> np.ndarray:
    """Return by how much each rank is later than the others usually are, in each step.

    Usual is the (lower) median of the other ranks. Shapes are (ranks, steps), of two or more ranks.
    """
    ordered = np.sort(late_s, axis=0)
    middle = (len(late_s) - 2) // 2  # of the others, were they without this rank's own value
    usual = np.where(late_s <= ordered[middle], ordered[middle + 1], ordered[middle])
    return np.asarray(late_s - usual)


def chance(is_late: np.ndarray, i: int, window: tuple[int, int]) -> float:
    """Return a bound on the probability that noise gives rank `i` such a window somewhere.

    Noise would make steps late at the rate that is seen outside the window; that a window of n
    steps then has a share s of late ones has a probability of at most exp(-n KL(s, rate)), for
    each rank and place of the window.
    Source: W. Hoeffding, Probability inequalities for sums of bounded random variables (1963), 2.1.

    Args:
        is_late: which steps are late, shape (ranks, steps).
        i: the rank.
        window: its first and last step.
    """
    first, last = window
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


def late_window(late_s: np.ndarray, least_s: float, rules: BlameRules) -> tuple[int, int] | None:
    """Return the first and last step of the stretch in which a rank is late, if there is one.

    The stretch is the one that maximises the sum of (lateness - threshold), with lateness cut at
    a few thresholds so that a single hiccup cannot make a stretch. The threshold is half of what
    is typical for late steps, so that the edges fall where lateness begins and ends; a second look
    takes what is typical from the stretch itself, where noise does not dilute it.
    Source: maximum subarray, J. Bentley, Programming Pearls (1984).
    """
    above = late_s[late_s > least_s]
    if len(above) < rules.min_steps:
        return None
    typical = float(np.median(above))
    for _ in range(_LOOKS):
        threshold = max(least_s, typical / 2)
        score = np.clip(late_s, 0.0, 2 * threshold) - threshold
        first, last = _best_stretch(score)
        inside = late_s[first : last + 1]
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


def _best_stretch(score: np.ndarray) -> tuple[int, int]:
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
    i: int, ranks: tuple[RankPhases, ...], late_s: np.ndarray, first: int, last: int
) -> Straggler:
    window = slice(first, last + 1)
    others = [one for j, one in enumerate(ranks) if j != i]
    extra = ranks[i].seconds[window].mean(axis=0) - np.mean(
        [one.seconds[window].mean(axis=0) for one in others], axis=0
    )
    data_s = float(extra[PHASES.index("input")])
    working = [PHASES.index(one) for one in ("copy", "forward", "backward", "optimizer")]
    working += [PHASES.index("checkpoint"), PHASES.index("other")]
    rest_s = float(extra[working].sum())
    ran_s = float(
        ranks[i].running_s[window].mean() - np.mean([one.running_s[window] for one in others])
    )
    starved_s = float(
        ranks[i].not_running_s[window].mean()
        - np.mean([one.not_running_s[window] for one in others])
    )
    starved_s = max(0.0, min(starved_s, rest_s - max(0.0, ran_s)))
    by_cause = {"data": data_s, "compute": rest_s - starved_s, "not_running": starved_s}
    waiting = PHASES.index("waiting")
    shares = [
        one.seconds[window, waiting].sum() / max(1e-12, one.step_s[window].sum()) for one in others
    ]
    return Straggler(
        rank=ranks[i].rank,
        cause=max(by_cause, key=lambda cause: by_cause[cause]),
        late_ms=1e3 * float(np.median(late_s[window])),
        first_step=first,
        last_step=last,
        others_wait=float(np.mean(shares)),
    )
