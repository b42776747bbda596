"""Reads the vectors of many clients a range of coordinates at a time.

A round of 100 clients with 10^6 parameters holds 400 MB. Stacking it doubles that, and sums in
float64 would take three times as much. A range of coordinates of all clients fits into the cache:
sums there are in float64, and only the result is as long as the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK_VALUES = 1 << 18
"""Values of all clients together that are held at a time: 1 MiB in float32."""


def parameters_of(deltas: Sequence[np.ndarray]) -> int:
    """Return the common length of the vectors.

    Raises:
        UsageError: there are none, or they differ in length.
    """
    if not deltas:
        raise UsageError(
            "there is no update to aggregate",
            where="aggregation",
            fix="Keep the model as it is in a round that no update was accepted in",
        )
    lengths = {delta.shape for delta in deltas}
    if len(lengths) > 1 or deltas[0].ndim != 1:
        raise UsageError(
            "updates to aggregate must be vectors of one length",
            where="aggregation",
            why=f"the shapes are {sorted(lengths)}",
            fix="Pass the updates through check_updates first",
        )
    return int(deltas[0].size)


def ranges(parameters: int, clients: int) -> Iterator[slice]:
    """Yield the ranges of coordinates that are read at a time."""
    length = max(1, CHUNK_VALUES // max(1, clients))
    for begin in range(0, parameters, length):
        yield slice(begin, min(parameters, begin + length))


def weighted_sum(deltas: Sequence[np.ndarray], weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the sum of weight x vector; float32, shape (parameters,).

    With weights that add up to 1 it is the weighted mean. Sums are in float64.

    Args:
        deltas: of the clients; each float32, shape (parameters,).
        weights: one for each; finite.

    Raises:
        UsageError: the vectors do not fit together, or a weight is missing or not finite.
    Source: H. B. McMahan et al., Communication-Efficient Learning of Deep Networks from
        Decentralized Data, AISTATS 2017, algorithm 1, for weights in proportion to samples.
    """
    parameters = parameters_of(deltas)
    factors = np.asarray(weights, np.float64)
    if factors.shape != (len(deltas),) or not np.isfinite(factors).all():
        raise UsageError(
            f"{len(deltas)} updates need as many finite weights",
            where="aggregation",
            why=f"the weights are {list(weights)[:8]}",
            fix="Make the weights of the updates that are passed",
        )
    result = np.empty(parameters, np.float32)
    for part in ranges(parameters, len(deltas)):
        total = np.zeros(part.stop - part.start)
        for delta, factor in zip(deltas, factors, strict=True):
            total += factor * delta[part]
        result[part] = total
    return result
