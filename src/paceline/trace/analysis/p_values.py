"""P-values of tests: tails of distributions, and bounds on them."""

from __future__ import annotations

import math

import numpy as np

_GRID = 2_000  # units of a sum


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
    """Return the probability that a rank has a sum as large as `own` by chance.

    Each amount, of `own` and `theirs`, is the rank's with probability `share`, independently. The
    distribution of the sum is computed on a grid, on which amounts are rounded so that the result
    is too large rather than too small.

    Args:
        own: amounts that the rank has, positive, shape (own,).
        theirs: amounts that others have, shape (theirs,).
        share: between 0 and 1.
    """
    total = float(own.sum() + theirs.sum())
    if total <= 0.0:
        return 1.0
    scale = _GRID / total
    down, up = np.floor(own * scale).astype(int), np.ceil(theirs * scale).astype(int)
    chances = np.zeros(int(down.sum() + up.sum()) + 1)
    chances[0] = 1.0
    for amount in (*down, *up):
        moved = share * chances
        chances *= 1 - share
        chances[amount:] += moved[: len(chances) - amount]
    return float(chances[int(down.sum()) :].sum())
