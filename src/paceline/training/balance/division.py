"""How many samples of a batch each rank gets, so that all ranks are ready at the same time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_BISECTIONS = 60  # halve the interval of the time until floats cannot tell its ends apart


class Speed(NamedTuple):
    """The seconds that a rank is busy with n samples: fixed_s + per_sample_s * n.

    Attributes:
        fixed_s: of a step, whatever its samples: the optimizer, the script's own work.
        per_sample_s: above 0.
    """

    fixed_s: float
    per_sample_s: float

    def busy_s(self, samples: int) -> float:
        """Return the seconds that the rank is busy with so many samples."""
        return self.fixed_s + self.per_sample_s * samples


def divide_samples(
    total: int, speeds: Sequence[Speed], least: int, most: Sequence[int]
) -> tuple[int, ...]:
    """Return the samples of each rank for which the last rank is ready as early as possible.

    Pure arithmetic on floats, in a fixed order, so that all ranks come to the same result.

    Args:
        total: samples of a batch of all ranks.
        speeds: of the ranks.
        least: samples of a rank.
        most: samples of each rank; with `least`, they can add up to `total`.
    """
    assert least * len(speeds) <= total <= sum(most)

    def by_time(ready_s: float) -> list[int]:
        """Return the most samples with which each rank is ready by that time, within the limits."""
        return [
            min(limit, max(least, math.floor((ready_s - speed.fixed_s) / speed.per_sample_s)))
            for speed, limit in zip(speeds, most, strict=True)
        ]

    low_s = 0.0
    high_s = max(speed.busy_s(total) for speed in speeds)
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if sum(by_time(middle_s)) >= total:
            high_s = middle_s
        else:
            low_s = middle_s
    samples = by_time(high_s)
    while sum(samples) < total:  # floats round: a sample or two
        first = min(
            (rank for rank, count in enumerate(samples) if count < most[rank]),
            key=lambda rank: (speeds[rank].busy_s(samples[rank] + 1), rank),
        )
        samples[first] += 1
    # Ranks that would be ready at the same time all got their last sample: some are one too many.
    while sum(samples) > total:
        last = max(
            (rank for rank, count in enumerate(samples) if count > least),
            key=lambda rank: (speeds[rank].busy_s(samples[rank]), -rank),
        )
        samples[last] -= 1
    return tuple(samples)


def in_proportion(total: int, weights: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Return `total` samples, divided in proportion to the weights; no rank gets less than `least`.

    Largest remainders, lower ranks first.
    """
    assert least * len(weights) <= total
    whole = math.fsum(weights)
    exact = [total * weight / whole for weight in weights]
    samples = [max(least, math.floor(value)) for value in exact]
    order = sorted(range(len(exact)), key=lambda rank: (samples[rank] - exact[rank], rank))
    number = 0
    while sum(samples) < total:
        samples[order[number % len(order)]] += 1
        number += 1
    while sum(samples) > total:
        largest = max(range(len(samples)), key=lambda rank: (samples[rank] - exact[rank], -rank))
        reducible = [rank for rank, count in enumerate(samples) if count > least]
        if largest not in reducible:
            largest = max(reducible, key=lambda rank: (samples[rank] - exact[rank], -rank))
        samples[largest] -= 1
    return tuple(samples)
