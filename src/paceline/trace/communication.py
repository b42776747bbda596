"""What a run's collectives moved and how fast, apart from the waiting for late ranks.

A collective's transfer proper lasts from the moment when its last rank came to the moment when the
last rank had its result. What it queued behind earlier collectives counts as transfer, since no
rank can tell the two apart. Grouped by operation, process group and size, so that each line can
be compared with what the machine's links promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.arrivals import Arrival, Encounters, Key, arrivals

if TYPE_CHECKING:
    from paceline.trace.merge import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic(Record):
    """Collectives of one operation, group and size class.

    Attributes:
        operation: the field's word for it, for example ``all_reduce``.
        group: name of the process group.
        ranks: that took part.
        size_class_bytes: the power of two that no collective of the class exceeds; 0 for those
            that carry nothing.
        count: collectives, each counted once and not per rank.
        bytes: that one rank gave to all of them together, the mean over ranks.
        typical_bytes: that one rank gave to one of them, the median.
        transfer_s: from the last rank's arrival to the last completion, the median.
        spread_s: from the first rank's arrival to the last one's, the median.
    """

    operation: str
    group: str
    ranks: int
    size_class_bytes: int
    count: int
    bytes: int
    typical_bytes: float
    transfer_s: float
    spread_s: float

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Bytes that one rank gave, over the transfer; None when nothing was carried."""
        if not self.typical_bytes or self.transfer_s <= 0:
            return None
        return self.typical_bytes / self.transfer_s


def communication(trace: Trace, known: Encounters | None = None) -> tuple[Traffic, ...]:
    """Return the run's collectives by operation, group and size, the costliest first."""
    met: dict[Key, list[Arrival]] = {}
    for mine in known.arrivals if known else arrivals(trace):
        for key, arrival in mine.items():
            met.setdefault(key, []).append(arrival)
    classes: dict[tuple[str, str, int], list[list[Arrival]]] = {}
    for (group, _), present in met.items():
        largest = max(arrival.amount for arrival in present)
        place = (present[0].name, group, size_class_bytes(largest))
        classes.setdefault(place, []).append(present)
    found = [_traffic(*place, together) for place, together in classes.items()]
    return tuple(sorted(found, key=lambda one: -one.count * one.transfer_s))


def size_class_bytes(amount: int) -> int:
    """Return the smallest power of two that holds `amount` bytes; 0 for none.

    >>> [size_class_bytes(amount) for amount in (0, 1, 4, 5)]
    [0, 1, 4, 8]
    """
    return 1 << (amount - 1).bit_length() if amount else 0


def _traffic(operation: str, group: str, size: int, together: list[list[Arrival]]) -> Traffic:
    amounts, transfers, spreads = [], [], []
    for present in together:
        last_ns = max(arrival.issue_ns for arrival in present)
        amounts.append(float(np.mean([arrival.amount for arrival in present])))
        transfers.append(max(0, max(arrival.complete_ns for arrival in present) - last_ns))
        spreads.append(last_ns - min(arrival.issue_ns for arrival in present))
    return Traffic(
        operation=operation,
        group=group,
        ranks=max(len(present) for present in together),
        size_class_bytes=size,
        count=len(together),
        bytes=round(sum(amounts)),
        typical_bytes=float(np.median(amounts)),
        transfer_s=float(np.median(transfers)) / 1e9,
        spread_s=float(np.median(spreads)) / 1e9,
    )
