"""Finds ranges, lines and episodes in the delay of one rank; `periods` finds what repeats.

Each function looks for its shape in one series, and returns it with its p-value: how likely noise
alone produces it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.trace.analysis.p_values import (
    binomial_tail,
    sum_tail,
    upper_tail,
    upper_tail_t,
)

MIN_STEPS = 8  # of a range, and of a run that is judged
MIN_CYCLES = 5  # of what repeats
_PASSES = 2
_MIN_BATCH, _BATCHES, _FEW_BATCHES = 4, 24, 8  # steps of a batch, if there are so many; batches
_MANY = 50  # steps that tell whether neighbours resemble each other
_TREND_BATCHES = 16
_CORRELATED = 0.3  # from here on neighbouring batches are not independent
_FEW = 0.05  # of the steps, at most, that are rare
_GAP = 2  # steps on time that do not yet end an episode


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternRules:
    """Thresholds of the shapes: the limits of `BlameRules` in the units of one series.

    Attributes:
        late_threshold_s: a step is late if the series is above it, seconds.
        min_late_steps: share of the steps of a range, or of every k-th step, that must be late.
        max_p_value: largest p-value of a pattern, corrected as in `Pattern.p_value`.
        series: number of series that are searched: a p-value is for all of them together.
    """

    late_threshold_s: float
    min_late_steps: float
    max_p_value: float
    series: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pattern:
    """A shape of a rank's delay.

    Attributes:
        shape: persistent, periodic, drifting, intermittent, recurring or rare.
        first: first step of the range.
        last: last step of the range.
        late: the steps in which the rank was late by this pattern, shape (steps,).
        fitted_s: delay in each step as the pattern describes it, shape (steps,), seconds.
        parameters: of the description: levels, ends of ranges, period and place in it.
        p_value: probability that noise alone produces such a pattern somewhere in the run, at
            most 1: corrected for the number of series, ranges and periods that were tried.
        period: steps from one late step, or block of them, to the next; 0 if there is no rhythm.
        block: late steps on end, if it is recurring.
        slope_s: seconds by which the delay grows in each step; 0 if not drifting.
    """

    shape: str
    first: int
    last: int
    late: np.ndarray
    fitted_s: np.ndarray
    parameters: int
    p_value: float
    period: int = 0
    block: int = 0
    slope_s: float = 0.0


# --- a range of steps -----------------------------------------------------------------------------


def persistent(series: np.ndarray, others: np.ndarray, rules: PatternRules) -> Pattern | None:
    """Return the range in which the rank is late in most steps, if there is one.

    Batches of steps are independent of each other where single steps are not: the range is tested
    by Student's t over them, with medians in place of means, which one very late step would move.
    The p-value is multiplied by the number of ranges that begin and end with a batch.
    That tells a range from noise that lasts a step or a batch, but one burst of noise is a range,
    too: the range must also be longer than the bursts of the other ranks let expect.
    Source: batch means, R. Conway, Some tactical problems in digital simulation (1963).
    """
    found = _late_range(series, rules.late_threshold_s)
    if found is None:
        return None
    first, last = found
    inside = series[first : last + 1]
    level = float(np.median(inside))
    late = np.zeros(len(series), dtype=bool)
    late[first : last + 1] = True
    is_late = inside > min(rules.late_threshold_s, level / 2)
    if level < rules.late_threshold_s or float(np.mean(is_late)) < rules.min_late_steps:
        return None
    p_value, batch_count = _p_value_of_mean(inside, np.delete(series, slice(first, last + 1)))
    places = len(series) / len(inside) * batch_count  # where a range can begin and end
    return Pattern(
        shape="persistent",
        first=first,
        last=last,
        late=late,
        fitted_s=np.where(late, level, 0.0),
        parameters=3,
        p_value=min(
            1.0,
            rules.series
            * max(places * (places + 1) / 2 * p_value, _p_value_of_burst(inside, others, rules)),
        ),
    )


def _p_value_of_burst(inside: np.ndarray, others: np.ndarray, rules: PatternRules) -> float:
    """Return the probability that bursts as those of the other ranks make such a range in a run.

    A late step scores about 1 and a step on time -1; a burst's score is the highest sum in it. High
    scores of noise are distributed exponentially. The mean of that distribution is half the mean
    that weights each burst by its score, so that single late steps, which are many, do not make
    bursts look short. Another rank's highest burst does not count: it may be a range of that rank,
    which is late, too. The p-value is 0 if there are no further bursts.
    Source: S. Karlin and S. Altschul, Methods for assessing the statistical significance of
    molecular sequence features by using general scoring schemes (1990).

    Args:
        inside: the delay in the range.
        others: the series of other ranks, shape (other ranks, steps).
        rules: the thresholds: from how many seconds a step is late, and the largest p-value.
    """
    mean, count = bursts_of(others, rules.late_threshold_s)
    if mean == 0.0:
        return 0.0
    score = max(0.0, float(scores_of(inside, rules.late_threshold_s).sum()))
    return (1 + count) * math.exp(-score / mean)


def bursts_of(others: np.ndarray, level_s: float) -> tuple[float, float]:
    """Return the mean score of the bursts of other ranks, and how many each of them has; or zeros.

    Args:
        others: their series, shape (other ranks, steps).
        level_s: delay with a score of 0.
    """
    series = scores_of(others, level_s)
    bursts = np.concatenate([np.sort(_burst_scores(scores))[:-1] for scores in series])
    if not len(bursts):
        return 0.0, 0.0
    return float(np.sum(bursts**2) / np.sum(bursts)) / 2, len(bursts) / len(others)


def scores_of(delay_s: np.ndarray, level_s: float) -> np.ndarray:
    """Return the score of each step: from -1, on time, to 1, late by twice the level."""
    return np.asarray(np.clip(delay_s / level_s, 0.0, 2.0) - 1.0)


def _burst_scores(scores: np.ndarray) -> np.ndarray:
    """Return the highest sum in each burst: from a step until the sum is back at zero."""
    sums = np.concatenate([[0.0], np.cumsum(scores)])
    heights = sums - np.minimum.accumulate(sums)
    bursts = np.maximum.reduceat(heights, np.flatnonzero(heights == 0.0))
    return np.asarray(bursts[bursts > 0.0])


def _late_range(series: np.ndarray, late_threshold_s: float) -> tuple[int, int] | None:
    """Return the first and last step of the range that is late most clearly.

    It maximises the sum of (delay - level). Delay is clipped at twice the level, so that one very
    late step cannot make a range. The level is half the median of all late steps, and never less
    than half of `late_threshold_s`, so that the range begins and ends where the delay does; a
    second pass takes the median inside the range, which noise does not dilute.
    Source: maximum subarray, J. Bentley, Programming Pearls (1984).
    """
    above = series[series > late_threshold_s]
    if len(above) < MIN_STEPS:
        return None
    typical = float(np.median(above))
    first, last = 0, len(series) - 1
    for _ in range(_PASSES):
        level_s = max(late_threshold_s / 2, typical / 2)
        first, last = best_range(np.clip(series, 0.0, 2 * level_s) - level_s)
        typical = float(np.median(series[first : last + 1]))
    return (first, last) if last - first + 1 >= MIN_STEPS else None


def best_range(score: np.ndarray) -> tuple[int, int]:
    """Return the first and last index of the contiguous range with the largest sum."""
    sums = np.concatenate([[0.0], np.cumsum(score)])
    lowest = np.minimum.accumulate(sums[:-1])
    last = int(np.argmax(sums[1:] - lowest))
    return int(np.argmin(sums[: last + 1])), last


def _p_value_of_mean(series: np.ndarray, outside: np.ndarray) -> tuple[float, int]:
    """Return the probability of such a mean if the true one is zero, and the number of batches.

    Batches are made longer as long as neighbouring ones resemble each other. Source: G. Fishman,
    Grouping observations in digital simulation (1978). A short range would have too few batches to
    tell anything; its batches may be shorter if even single steps do not resemble their neighbours.

    Args:
        series: the delay in the range.
        outside: the delay in all other steps.
    """
    shortest = _MIN_BATCH
    if len(outside) >= _MANY and max(_correlation(series), _correlation(outside)) < _CORRELATED:
        shortest = _MIN_BATCH // 2
    count = min(_BATCHES, max(len(series) // shortest, min(4, len(series))))
    while True:
        middles = np.array([np.median(batch) for batch in np.array_split(series, count)])
        if count < 2 * _FEW_BATCHES or _correlation(middles) < _CORRELATED:
            break
        count //= 2
    spread = float(middles.std(ddof=1)) / math.sqrt(count)
    if spread == 0.0:
        return 0.0, count
    return upper_tail_t(float(middles.mean()) / spread, count - 1), count


def _correlation(values: np.ndarray) -> float:
    """Return the correlation of neighbouring values; 0 if they are all equal."""
    around = values - values.mean()
    return float(np.sum(around[1:] * around[:-1]) / max(1e-300, float(np.sum(around**2))))


# --- later and later ------------------------------------------------------------------------------


def drifting(series: np.ndarray, rules: PatternRules) -> Pattern | None:
    """Return the line that the delay follows, if it grows or shrinks over the whole run.

    The slope is the median of the slopes between medians of batches of steps; whether it is one is
    tested by the number of pairs that rise. Sources: H. Theil (1950) and P. Sen (1968); H. Mann
    (1945) and M. Kendall, Rank Correlation Methods (1948); the spread is that of autocorrelated
    batches, S. Yue and C. Wang, The Mann-Kendall test modified by effective sample size (2004).
    """
    batches = np.array_split(series, min(_TREND_BATCHES, len(series) // _MIN_BATCH))
    if len(batches) < MIN_STEPS:
        return None
    middles = np.array([np.median(batch) for batch in batches])
    lengths = np.array([len(batch) for batch in batches])
    at = np.cumsum(lengths) - (lengths + 1) / 2
    early, late = np.triu_indices(len(batches), 1)
    rises = middles[late] - middles[early]
    slope = float(np.median(rises / (at[late] - at[early])))
    intercept = float(np.median(middles - slope * at))
    steps = np.arange(len(series))
    fitted = np.maximum(0.0, intercept + slope * steps)
    is_late = fitted > rules.late_threshold_s
    if abs(slope) * len(series) < 2 * rules.late_threshold_s or is_late.sum() < MIN_STEPS:
        return None
    ends = np.flatnonzero(fitted > 0)[[0, -1]]
    count = len(batches)
    memory = min(0.9, max(0.0, _correlation(middles - intercept - slope * at)))
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18 * (1 + memory) / (1 - memory))
    score = (abs(float(np.sign(rises).sum())) - 1) / spread
    return Pattern(
        shape="drifting",
        first=int(ends[0]),
        last=int(ends[1]),
        late=is_late,
        fitted_s=fitted,
        parameters=2,
        p_value=min(1.0, 2 * rules.series * upper_tail(score)),
        slope_s=slope,
    )


# --- now and then ---------------------------------------------------------------------------------


def intermittent(series: np.ndarray, others: np.ndarray, rules: PatternRules) -> Pattern | None:
    """Return the episodes of late steps, if this rank has more of them than its share.

    Noise brings episodes to all ranks alike: of all episodes each is this rank's with a probability
    of 1 / ranks. Small and large delays are tried, since noise brings many small episodes; and both
    the number of episodes and their seconds, since on a noisy node other ranks have as many.
    Where one episode has most of the late steps the delay is a range, whatever else there is.
    Sources: the exact binomial (sign) test, W. Conover, Practical Nonparametric Statistics, 3.1; of
    sums, R. A. Fisher, The Design of Experiments, 1935, section 21.
    """
    positive = series[series > rules.late_threshold_s]
    if not len(positive):
        return None
    sizes = np.quantile(positive, [0.5, 0.9]).tolist()
    levels = {max(rules.late_threshold_s, size / 2) for size in sizes}
    best: tuple[float, np.ndarray] | None = None
    for level_s in levels:
        late = series > level_s
        begins = _episode_begins(late)
        own = int(begins.sum())
        if own < MIN_CYCLES:
            continue
        longest = int(np.bincount(np.cumsum(begins)[late]).max())
        if longest >= MIN_STEPS and longest > late.sum() / 2:
            continue
        theirs = int(_episode_begins(others > level_s).sum())
        share = 1 / (1 + len(others))
        by_count = binomial_tail(own, theirs, share)
        own_s, theirs_s = _episodes_s(series, level_s), _episodes_s(others, level_s)
        p_value = 2 * min(by_count, sum_tail(own_s, theirs_s, share))
        if best is None or p_value < best[0]:
            best = (p_value, late)
    if best is None:
        return None
    p_value, late = best
    steps = np.flatnonzero(late)
    return Pattern(
        shape="intermittent",
        first=int(steps[0]),
        last=int(steps[-1]),
        late=late,
        fitted_s=np.where(late, float(np.median(series[late])), 0.0),
        parameters=1 + 2 * int(_episode_begins(late).sum()),
        p_value=min(1.0, rules.series * len(levels) * p_value),
    )


def _episodes_s(series: np.ndarray, level_s: float) -> np.ndarray:
    """Return the seconds of each episode of late steps, of one series or of several in turn."""
    late = series > level_s
    numbers = np.cumsum(_episode_begins(late))  # goes on from row to row
    return np.bincount(numbers, weights=np.where(late, series, 0.0).ravel())[1:]


def _episode_begins(late: np.ndarray) -> np.ndarray:
    """Return the steps that begin an episode: late ones after some on time; shapes as `late`."""
    before = np.zeros_like(late)
    for distance in range(1, _GAP + 2):
        before[..., distance:] |= late[..., :-distance]
    return np.asarray(late & ~before)


# --- a few steps ----------------------------------------------------------------------------------


def rare(series: np.ndarray, threshold_s: float) -> Pattern | None:
    """Return the few steps in which the rank is late by more than a threshold, if there are any.

    They are no pattern that is tested: what happened in them is a fact, whatever happens in others.
    """
    late = series > threshold_s
    steps = np.flatnonzero(late)
    if not 0 < len(steps) <= _FEW * len(series):
        return None
    return Pattern(
        shape="rare",
        first=int(steps[0]),
        last=int(steps[-1]),
        late=late,
        fitted_s=np.where(late, series, 0.0),
        parameters=len(steps),
        p_value=0.0,
    )
