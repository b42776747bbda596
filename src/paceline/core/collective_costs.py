"""Which of a Machine's collective costs hold for a call, and what lies between their points."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.core.plan import is_chosen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.core.plan import CollectivesChoice


class _Cost(Protocol):
    """What decides here of a CollectiveCost, whose module imports this one."""

    @property
    def backend(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def hosts(self) -> int: ...


C = TypeVar("C", bound=_Cost)


def costs_of(
    costs: Iterable[C], operation: str, collectives: CollectivesChoice, hosts: int
) -> tuple[C, ...]:
    """Return the costs from which an operation of a library is predicted.

    Costs between hosts never stand for one host. Costs of one host stand for several hosts only if
    none was measured between hosts; a prediction says that it is extrapolated.

    Args:
        costs: of a Machine.
        operation: for example ``all_reduce``.
        collectives: of which library; ``torch`` is any but Paceline's.
        hosts: over which the ranks are spread.
    """
    fitting = [
        cost
        for cost in costs
        if cost.operation == operation and is_chosen(cost.backend, collectives)
    ]
    inside = tuple(cost for cost in fitting if cost.hosts == 1)
    between = tuple(cost for cost in fitting if cost.hosts > 1)
    return between or inside if hosts > 1 else inside


def nearest_cost(costs: Iterable[C], hosts: int, ranks: int) -> C | None:
    """Return the cost with the nearest number of hosts, then of ranks; none of no costs."""
    return min(
        costs,
        key=lambda cost: (abs(cost.hosts - hosts), abs(cost.ranks - ranks)),
        default=None,
    )


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at `x` of a curve of lines: constant below, extrapolated beyond the points.

    Args:
        points: (x, value), at least one, x rising; one alone is extrapolated in proportion.
        x: not negative.

    >>> [interpolated([(1, 1), (3, 2)], x) for x in (0, 1, 2, 5)], interpolated([(2, 1)], 6)
    ([1, 1.0, 1.5, 3.0], 3.0)
    """
    first_x, first = points[0]
    if x < first_x:
        return first
    for (low_x, low), (high_x, high) in itertools.pairwise(points):
        if x <= high_x or high_x == points[-1][0]:
            return low + (x - low_x) * (high - low) / (high_x - low_x)
    return first * x / max(first_x, 1.0) if x > first_x else first
