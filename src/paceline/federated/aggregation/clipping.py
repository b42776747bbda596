"""Bounds the norm of an update, so that no client can move the model further than the others."""

from __future__ import annotations

import math

import numpy as np

from paceline.core.errors import UsageError

_CHUNK = 1 << 16


def norm(delta: np.ndarray) -> float:
    """Return the Euclidean norm, summed in float64; NaN or infinite where a value is.

    In float32 the squares of values above 1.8e19 overflow; a copy in float64 would be twice as
    large as the vector.
    """
    total = 0.0
    for begin in range(0, delta.size, _CHUNK):
        part = delta[begin : begin + _CHUNK].astype(np.float64)
        total += float(part @ part)
    return math.sqrt(total) if total >= 0 else math.nan


def clip(delta: np.ndarray, bound: float) -> np.ndarray:
    """Return the vector, scaled down to the norm `bound` if it is longer.

    A vector within the bound is returned itself, without a copy.

    Raises:
        UsageError: the bound is not positive, or the vector has no finite norm.
    """
    length = norm(delta)
    if not bound > 0 or not math.isfinite(length):
        raise UsageError(
            f"a vector of norm {length:g} cannot be clipped to {bound:g}",
            where="aggregation",
            fix="Pass the updates through check_updates first, and give a bound above 0",
        )
    if length <= bound:
        return delta
    return np.asarray(delta * np.float32(bound / length))
