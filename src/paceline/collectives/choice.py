"""Which calls between hosts take two levels, and which go to gloo as one flat group.

The table of a Machine has two curves of each operation, seconds over bytes: ``flat`` and
``two_level``. The lower curve wins::

    seconds      flat /
        |           /   . two_level
        |       . /.  '
        |  . '  /
        |_____/|__________ bytes          a Crossover: flat below, two levels from here on

Both curves are lines between their points, so the sizes at which they cross are computed once, when
a group is made; a call then costs a search in a short tuple. No torch here.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.machine import CollectiveCost

FLAT = "flat"
TWO_LEVEL = "two_level"


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossover(Record):
    """The sizes at which an operation changes between one flat group and two levels.

    Attributes:
        sizes_bytes: in rising order; a call of exactly so many bytes counts as above.
        starts_flat: whether calls below the first size are flat.
    """

    sizes_bytes: tuple[float, ...]
    starts_flat: bool = True

    def takes_two_levels(self, size_bytes: float) -> bool:
        """Return whether a call of that size takes two levels."""
        is_odd = bisect.bisect_right(self.sizes_bytes, size_bytes) % 2 == 1
        return is_odd == self.starts_flat

    @staticmethod
    def between(flat: CollectiveCost, two_level: CollectiveCost) -> Crossover:
        """Return where two curves cross; of equal times the flat one wins."""
        sizes = sorted({point.bytes for cost in (flat, two_level) for point in cost.points})
        sizes.append(sizes[-1] + max(sizes[-1], 1.0))  # on the lines beyond the last points
        gains_s = [flat.seconds_at(size) - two_level.seconds_at(size) for size in sizes]
        crossings = []
        ends = list(zip(sizes, gains_s, strict=True))
        for (low, low_s), (high, high_s) in itertools.pairwise(ends):
            is_last = high == sizes[-1]
            if (low_s > 0) == (high_s > 0) and not is_last:
                continue
            if low_s == high_s or (low_s > 0) == (high_s > low_s):  # beyond, they move apart
                continue
            crossings.append(low + (high - low) * low_s / (low_s - high_s))
        return Crossover(sizes_bytes=tuple(crossings), starts_flat=gains_s[0] <= 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PathChoice(Record):
    """Which calls of a group on several hosts take two levels; the same on all of its ranks.

    Attributes:
        measured: by operation, from the table of a Machine.
        otherwise: for operations that the table lacks.
    """

    measured: dict[str, Crossover] = field(default_factory=dict)
    otherwise: Crossover

    def takes_two_levels(self, operation: str, size_bytes: float) -> bool:
        """Return whether a call takes two levels.

        Args:
            operation: for example ``all_reduce``.
            size_bytes: of the tensors that a rank passes to it; of one rank's part in an
                all-gather, reduce-scatter, gather or scatter.
        """
        crossover = self.measured.get(operation, self.otherwise)
        return crossover.takes_two_levels(size_bytes)


def measured_crossovers(
    costs: Iterable[CollectiveCost], hosts: int, ranks: int
) -> dict[str, Crossover]:
    """Return the crossover of each operation that was measured both ways between hosts.

    Where the table has no entry for that many hosts and ranks, the nearest one counts: first the
    nearest number of hosts, then of ranks, both by their ratio. With more hosts the flat group's
    latency grows faster than that of two levels, so a table of fewer hosts errs to the flat side.

    Args:
        costs: of a Machine; those of one host are left out.
        hosts: of the group.
        ranks: of the group.
    """
    by_shape: dict[str, dict[tuple[int, int], dict[str, CollectiveCost]]] = {}
    for cost in costs:
        if cost.hosts > 1 and cost.algorithm in (FLAT, TWO_LEVEL):
            shapes = by_shape.setdefault(cost.operation, {})
            shapes.setdefault((cost.hosts, cost.ranks), {})[cost.algorithm] = cost

    def distance(shape: tuple[int, int]) -> tuple[float, float]:
        return abs(math.log(shape[0] / hosts)), abs(math.log(shape[1] / ranks))

    found = {}
    for operation, shapes in by_shape.items():
        complete = [shape for shape, forms in shapes.items() if len(forms) == 2]
        if complete:
            forms = shapes[min(complete, key=distance)]
            found[operation] = _by_part(Crossover.between(forms[FLAT], forms[TWO_LEVEL]), forms)
    return found


def _by_part(crossover: Crossover, forms: dict[str, CollectiveCost]) -> Crossover:
    """Return sizes of one rank's part: a cost counts what a rank passes to a reduce-scatter."""
    cost = forms[FLAT]
    if cost.operation != "reduce_scatter":
        return crossover
    sizes = tuple(size / cost.ranks for size in crossover.sizes_bytes)
    return Crossover(sizes_bytes=sizes, starts_flat=crossover.starts_flat)
