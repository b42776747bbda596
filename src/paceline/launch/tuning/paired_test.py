"""Decides from pairs of blocks which of two values makes steps shorter, or that none is.

Each pair has a block of steps with either value, in an order drawn by lot. If the values are equal,
exchanging them in a pair changes the sign of its difference, and each combination of signs is as
likely as any other: the signed-rank statistic has a known distribution, whatever that of the noise,
its bursts and its drift. So the false choices are bounded without any assumption on step times.

The test looks several times, and each look has its own part of the false choices that are allowed,
so that looking early does not add to them::

    pairs        8      16     32
    p-value    0.01   0.015  0.025      together 0.05 (C. Bonferroni, 1936)

Source: F. Wilcoxon, Individual comparisons by ranking methods (1945); estimate and interval: J.
Hodges and E. Lehmann, Estimates of location based on rank tests (1963).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Verdict = Literal["undecided", "first", "second", "equal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRules:
    """How long two values are tried, and when one is better.

    Attributes:
        warm_up_steps: before the first block.
        block_steps: of a block.
        settle_steps: at the begin of a block, that do not count.
        looks: numbers of pairs after which the test looks.
        levels: largest p-value at each look; their sum is the share of false choices.
        least_gain: by which steps must be shorter to be worth a change, a share.
    """

    warm_up_steps: int = 10
    block_steps: int = 8
    settle_steps: int = 2
    looks: tuple[int, ...] = (8, 16, 32)
    levels: tuple[float, ...] = (0.01, 0.015, 0.025)
    least_gain: float = 0.01

    def __post_init__(self) -> None:
        assert len(self.looks) == len(self.levels)
        assert 0 <= self.settle_steps < self.block_steps

    @property
    def most_pairs(self) -> int:
        """Pairs after which the test ends."""
        return self.looks[-1]


class PairedDifference(NamedTuple):
    """What the second value changes, as a share of the first one's step; below 0 is shorter.

    Attributes:
        change: estimate.
        low: of its interval, which holds the true change with a probability of 1 minus the look's
            level.
        high: of the same.
        p_value: probability of such a difference, or a larger one, between equal values.
    """

    change: float
    low: float
    high: float
    p_value: float


def judge(
    first_s: Sequence[float], second_s: Sequence[float], rules: TuneRules
) -> tuple[Verdict, PairedDifference | None]:
    """Return what follows from the pairs so far.

    Args:
        first_s: step time with the first value in each pair, seconds.
        second_s: with the second value.
        rules: of the test.

    Returns:
        ``undecided`` between looks, and after a look that has not decided; ``equal`` when the last
        look does not find a difference that is worth a change. And the difference at a look.
    """
    pairs = len(first_s)
    if pairs not in rules.looks:
        return "undecided", None
    level = rules.levels[rules.looks.index(pairs)]
    logs = np.log(np.asarray(second_s) / np.asarray(first_s))
    found = difference(logs, level)
    if found.p_value <= level and abs(found.change) >= rules.least_gain:
        return ("second" if found.change < 0 else "first"), found
    return ("equal" if pairs >= rules.most_pairs else "undecided"), found


def difference(logs: np.ndarray, level: float) -> PairedDifference:
    """Return the estimate of a change, its interval and its p-value.

    Args:
        logs: logarithm of second over first, of each pair, shape (pairs,).
        level: probability that the interval misses the change.
    """
    count = len(logs)
    away = np.abs(logs)
    ranks = _mid_ranks(away)
    above = float(ranks[logs > 0].sum() + ranks[logs == 0].sum() / 2)
    tails = _tails(count)
    smaller = min(above, count * (count + 1) / 2 - above)
    p_value = min(1.0, 2 * float(tails[math.ceil(smaller)]))
    first, second = np.triu_indices(count)
    walsh = np.sort((logs[first] + logs[second]) / 2)
    cut = int(np.searchsorted(tails, level / 2, side="right"))  # smallest and largest to leave out
    low, middle, high = walsh[max(0, cut - 1)], np.median(walsh), walsh[-max(1, cut)]
    change, low, high = (math.expm1(float(value)) for value in (middle, low, high))
    return PairedDifference(change, low, high, p_value)


def _mid_ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse])


@functools.cache
def _tails(count: int) -> np.ndarray:
    """Return P(W <= w) of the sum of ranks with a positive sign, for w from 0, shape (sums,).

    Each rank is in the sum or not, each with the probability 1/2: the distribution of a sum is
    built rank by rank.
    """
    shares = np.zeros(count * (count + 1) // 2 + 1)
    shares[0] = 1.0
    for rank in range(1, count + 1):
        shares[rank:] = shares[rank:] + shares[:-rank]
        shares /= 2
    return np.cumsum(shares)
