"""A measured figure with its interval: the value over all rounds, and that of each round alone.

A short disturbance of a machine rarely affects every round. The value is that of the undisturbed
machine; the spread over the rounds is its interval. Standard library only.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from paceline.core.machine import Quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROUNDS = 3


def typical_s(samples: Sequence[float]) -> float:
    """Return the 20th percentile of the samples: the duration of an undisturbed call.

    The median would be right on an idle node; a neighbour that takes the core for some of the time
    must not be measured as a property of the machine.
    """
    return sorted(samples)[len(samples) // 5]


def typical_by_round(samples: Sequence[float]) -> list[float]:
    """Return `typical_s` of all samples, then of each of `ROUNDS` consecutive parts of them.

    >>> typical_by_round([3.0, 1.0, 2.0])
    [1.0, 3.0, 1.0, 2.0]
    """
    count = len(samples)
    assert count >= ROUNDS
    edges = [count * i // ROUNDS for i in range(ROUNDS + 1)]
    parts = [samples[begin:end] for begin, end in itertools.pairwise(edges)]
    return [typical_s(samples), *map(typical_s, parts)]


def probed(figures: Iterable[float]) -> Quantity:
    """Return a figure that was measured: its value first, then that of each round.

    >>> probed([2.0, 1.5, 3.0])
    Quantity(value=2.0, source='probe', low=1.5, high=3.0)
    """
    values = [float(figure) for figure in figures]
    return Quantity(value=values[0], source="probe", low=min(values), high=max(values))
