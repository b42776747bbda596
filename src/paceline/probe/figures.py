"""A measured figure with its interval: the value over all rounds, and that of each round alone.

A short disturbance of a machine rarely affects every round. The value is that of the undisturbed
machine; the spread over the rounds is its interval. Standard library only.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

from paceline.core.machine import Quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROUNDS = 3


def typical_s(samples: Sequence[float]) -> float:
    """Return the median of the samples, as the figures of a run are medians over its steps.

    What a neighbour does to a kernel now and then is not in it, and a part of a probe that a
    neighbour disturbed for longer is measured again (`quiet`). A lower percentile, which needs no
    such care, makes predictions 5 to 10 % too short: no step of a run is as fast as the fastest
    calls of all its operators.
    """
    return statistics.median(samples)


def typical_by_round(samples: Sequence[float]) -> list[float]:
    """Return `typical_s` of all samples, then of each of `ROUNDS` consecutive parts of them.

    >>> typical_by_round([3.0, 1.0, 2.0])
    [2.0, 3.0, 1.0, 2.0]
    """
    return [typical_s(samples), *map(typical_s, _rounds(samples))]


def mean_by_round(samples: Sequence[float]) -> list[float]:
    """Return the mean of all samples, then of each of `ROUNDS` consecutive parts of them.

    >>> mean_by_round([3.0, 1.0, 2.0])
    [2.0, 3.0, 1.0, 2.0]
    """
    return [statistics.fmean(samples), *map(statistics.fmean, _rounds(samples))]


def _rounds(samples: Sequence[float]) -> list[Sequence[float]]:
    count = len(samples)
    assert count >= ROUNDS
    edges = [count * i // ROUNDS for i in range(ROUNDS + 1)]
    return [samples[begin:end] for begin, end in itertools.pairwise(edges)]


def probed(figures: Iterable[float]) -> Quantity:
    """Return a figure that was measured: its value first, then that of each round.

    >>> probed([2.0, 1.5, 3.0])
    Quantity(value=2.0, source='probe', low=1.5, high=3.0)
    """
    values = [float(figure) for figure in figures]
    return Quantity(value=values[0], source="probe", low=min(values), high=max(values))
