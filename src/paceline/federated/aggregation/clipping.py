"""Bounds the norm of an update, so that no client can move the model further than the others."""

from __future__ import annotations

import math

import numpy as np

from paceline.core.errors import UsageError
from paceline.federated.updates import norm


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
