"""P-values of tests: tails of distributions, and bounds on them."""

from __future__ import annotations

import math
import sys

import numpy as np

_GRID = 2_000  # units of a sum
_FEW = 200  # amounts, of which a sum's distribution is computed
_NEWTON_STEPS = 20
_LARGEST_T = 100.0  # of amounts that are at most 1


def upper_tail_t(value: float, freedom: int) -> float:
    """Return P(T > value) of Student's t.

    Source: D. Wallace, Bounds on normal approximations to Student's and the chi-square
    distributions (1959); the error is below 0.3 % of the equivalent normal value.
    """
    z = math.sqrt(freedom * math.log1p(value * value / freedom))
    z *= (8 * freedom + 1) / (8 * freedom + 3)
    return upper_tail(math.copysign(z, value))


def upper_tail(z: float) -> float:
    """Return P(Z > z) of the normal distribution."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def binomial_tail(own: int, others: int, share: float) -> float:
    """Return the probability that of `own + others` draws at least `own` are of a share."""
    count = own + others
    logs = [
        math.lgamma(count + 1)
        - math.lgamma(hits + 1)
        - math.lgamma(count - hits + 1)
        + hits * math.log(share)
        + (count - hits) * math.log1p(-share)
        for hits in range(own, count + 1)
    ]
    return min(1.0, sum(math.exp(value) for value in logs))


def divergence(share: np.ndarray, rate: float) -> np.ndarray:
    """Return the Kullback-Leibler divergence of a share from a rate; 0 for shares below it."""
    inner = np.clip(share, 1e-12, 1 - 1e-12)
    value = inner * np.log(inner / rate) + (1 - inner) * np.log((1 - inner) / (1 - rate))
    return np.where(share > rate, value, 0.0)


def sum_tail(own: np.ndarray, theirs: np.ndarray, share: float) -> float:
    """Return the probability that a rank has a sum as large as `own` by chance, or a bound above.

    Each amount, of `own` and `theirs`, is the rank's with probability `share`, independently. Of a
    few amounts the distribution is computed, on a grid on which they are rounded so that the result
    is too large rather than too small. Of many the rounding costs more than Chernoff's bound does.

    Source: H. Chernoff, A measure of asymptotic efficiency for tests of a hypothesis based on the
    sum of observations, 1952.

    Args:
        own: amounts that the rank has, positive, shape (own,).
        theirs: amounts that others have, positive, shape (theirs,).
        share: between 0 and 1.
    """
    if not len(own):
        return 1.0
    bound = _sum_bound(own, theirs, share)
    if len(own) + len(theirs) > _FEW:
        return bound
    return min(bound, _grid_tail(own, theirs, share))


def _grid_tail(own: np.ndarray, theirs: np.ndarray, share: float) -> float:
    scale = _GRID / float(own.sum() + theirs.sum())
    down, up = np.floor(own * scale).astype(int), np.ceil(theirs * scale).astype(int)
    chances = np.zeros(int(down.sum() + up.sum()) + 1)
    chances[0] = 1.0
    for amount in (*down, *up):
        moved = share * chances
        chances *= 1 - share
        chances[amount:] += moved[: len(chances) - amount]
    return float(chances[int(down.sum()) :].sum())


def _sum_bound(own: np.ndarray, theirs: np.ndarray, share: float) -> float:
    """Return the least exp(K(t) - t * sum) on the way to its minimum; K generates cumulants.

    Each t >= 0 gives a bound. Newton's steps that leave the interval are halves of it.
    """
    amounts = np.concatenate([own, theirs])
    amounts = amounts / amounts.max()
    total = float(amounts[: len(own)].sum())
    t, low, high, least = 0.0, 0.0, _LARGEST_T, 0.0
    for _ in range(_NEWTON_STEPS):
        odds = (1 - share) / share * np.exp(-t * amounts)
        chances = 1 / (1 + odds)
        cumulants = float(np.sum(t * amounts + math.log(share) + np.log1p(odds)))
        least = min(least, cumulants - t * total)
        gap = total - float(chances @ amounts)
        if abs(gap) < 1e-6 * total or (gap <= 0.0 and t == 0.0):
            break
        low, high = (t, high) if gap > 0 else (low, t)
        variance = float((chances * (1 - chances)) @ amounts**2)
        t += gap / max(variance, sys.float_info.min)
        if not low < t < high:
            t = (low + high) / 2
    return math.exp(least)
