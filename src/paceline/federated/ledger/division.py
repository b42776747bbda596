"""Division of an amount by shares, in integers, so that the parts sum to the amount exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


def divide(amount: int, scores: Mapping[str, float]) -> dict[str, int]:
    """Return each client's part of an amount, in proportion to its score.

    Each part is its exact quota rounded down; the units that are left go to the largest remainders,
    of equal ones to the client whose name sorts first. The result is a function of the scores
    alone: floats are taken as the exact fractions that they are, so no order of summation matters.

    Args:
        amount: to divide, in micro-tokens, at least 0.
        scores: by client, finite and at least 0.

    Returns:
        Micro-tokens by client, in the order of names; their sum is `amount`, or 0 if no score is
        above 0. A client with score 0 has 0.

    Raises:
        UsageError: a score is negative or not finite; the message names its client.

    Source: Hamilton's method (largest remainder) of apportionment.

    >>> divide(100, {"a": 1.0, "b": 1.0, "c": 1.0})
    {'a': 34, 'b': 33, 'c': 33}
    """
    weights = _integer_weights(scores)
    total = sum(weights.values())
    parts = dict.fromkeys(weights, 0)
    if not total:
        return parts
    remainders = {}
    for client, weight in weights.items():
        parts[client], remainders[client] = divmod(amount * weight, total)
    left = amount - sum(parts.values())
    assert 0 <= left < len(parts)
    by_remainder = sorted(parts, key=lambda client: (-remainders[client], client))
    for client in by_remainder[:left]:
        parts[client] += 1
    return parts


def _integer_weights(scores: Mapping[str, float]) -> dict[str, int]:
    """Return integers in the exact proportions of the scores, by client in the order of names."""
    for client, score in scores.items():
        if not (math.isfinite(score) and score >= 0):
            raise UsageError(
                f"the score of client {client} is {score!r}",
                why="pay is in proportion to scores",
                fix="Give a finite score of at least 0; 0 is no pay",
            )
    ratios = {client: scores[client].as_integer_ratio() for client in sorted(scores)}
    # Denominators of floats are powers of two: the largest one is a multiple of all.
    common = max((denominator for _, denominator in ratios.values()), default=1)
    return {
        client: numerator * (common // denominator)
        for client, (numerator, denominator) in ratios.items()
    }
