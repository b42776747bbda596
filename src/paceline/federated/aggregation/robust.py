"""Rules that a minority of clients cannot steer: median, trimmed mean, Krum.

                      tolerates of n        needs                       costs
    median            < n/2                 honest updates alike        n log n per coordinate
    trimmed mean      `trim` at each end    2 trim < n                  the same
    Krum, multi-Krum  f                     n >= 2 f + 3                n^2 distances

All of them pull towards what most clients have: with clients whose data differ, the only owner of
a rare class looks like an attacker to them. The contribution gate is the gentler tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.federated.aggregation.chunks import parameters_of, ranges, weighted_sum

if TYPE_CHECKING:
    from collections.abc import Sequence


def coordinate_median(deltas: Sequence[np.ndarray]) -> np.ndarray:
    """Return the median of each coordinate; float32, shape (parameters,).

    Source: D. Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
        ICML 2018, option I.
    """
    result = np.empty(parameters_of(deltas), np.float32)
    for part in ranges(result.size, len(deltas)):
        values = np.stack([delta[part] for delta in deltas])
        result[part] = np.median(values, axis=0, overwrite_input=True)
    return result


def trimmed_mean(deltas: Sequence[np.ndarray], trim: int) -> np.ndarray:
    """Return the mean of each coordinate without its `trim` smallest and `trim` largest values.

    Raises:
        UsageError: nothing would be left.
    Source: D. Yin et al., ICML 2018, option II.
    """
    count = len(deltas)
    result = np.empty(parameters_of(deltas), np.float32)
    if trim < 0 or 2 * trim >= count:
        raise UsageError(
            f"{trim} values at each end of {count} cannot be trimmed",
            where="aggregation",
            fix=f"Give 0 to {(count - 1) // 2}",
        )
    for part in ranges(result.size, count):
        values = np.stack([delta[part] for delta in deltas])
        values.sort(axis=0)
        result[part] = values[trim : count - trim].mean(axis=0, dtype=np.float64)
    return result


def krum(deltas: Sequence[np.ndarray], attackers: int) -> int:
    """Return the index of the update that is nearest to its n - f - 2 nearest neighbours.

    Args:
        deltas: n vectors.
        attackers: f, the most that there can be.

    Raises:
        UsageError: n is below 2 f + 3, where the rule promises nothing.
    Source: P. Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient
        Descent, NeurIPS 2017, section 4.
    """
    return int(np.argmin(_krum_scores(deltas, attackers)))


def multi_krum(deltas: Sequence[np.ndarray], attackers: int, chosen: int) -> np.ndarray:
    """Return the mean of the `chosen` updates with the best scores of Krum.

    Raises:
        UsageError: as `krum`, or more are to be chosen than n - f.
    Source: P. Blanchard et al., NeurIPS 2017, section 5.
    """
    scores = _krum_scores(deltas, attackers)
    if not 1 <= chosen <= len(deltas) - attackers:
        raise UsageError(
            f"multi-Krum cannot choose {chosen} of {len(deltas)} updates, {attackers} attackers'",
            where="aggregation",
            fix=f"Choose 1 to {len(deltas) - attackers}",
        )
    best = np.argsort(scores, kind="stable")[:chosen]
    return weighted_sum([deltas[index] for index in best], [1 / chosen] * chosen)


def _krum_scores(deltas: Sequence[np.ndarray], attackers: int) -> np.ndarray:
    """Return the sum of squared distances to the n - f - 2 nearest others, for each update."""
    count = len(deltas)
    if attackers < 0 or count < 2 * attackers + 3:
        raise UsageError(
            f"Krum needs 2 f + 3 updates for f = {attackers} attackers, and got {count}",
            where="aggregation",
            fix="Choose more clients per round, or assume fewer attackers",
        )
    distances = np.sort(squared_distances(deltas), axis=1)  # the first is to itself
    return np.asarray(distances[:, 1 : count - attackers - 1].sum(axis=1))


def squared_distances(deltas: Sequence[np.ndarray]) -> np.ndarray:
    """Return the squared distance of each pair; float64, shape (n, n).

    |x - c|^2 + |y - c|^2 - 2 (x - c).(y - c) with the first vector as c: without it, updates that
    share a long common part would lose their differences to rounding.
    Cost: n^2 products per coordinate, as matrix products of n x chunk values.
    """
    products = np.zeros((len(deltas), len(deltas)))
    for part in ranges(parameters_of(deltas), 2 * len(deltas)):
        values = np.stack([delta[part] for delta in deltas]).astype(np.float64)
        values -= values[0].copy()
        products += values @ values.T
    squares = np.diag(products)
    found = np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0)
    np.fill_diagonal(found, 0)
    return found
