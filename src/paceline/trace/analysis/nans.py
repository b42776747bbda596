"""The first value that was not a number when the script read it from a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import NAN_READ, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class NanValue(Record):
    """A value that was not a number (NaN), as `.item()`, `.tolist()` or `float()` gave it.

    The recorder never looks into tensors by itself, which would wait for a device. So this is the
    loss if the script reads its loss, and a NaN that the script does not read goes unnoticed.

    Attributes:
        rank: that read it first: in the earliest step, the lowest rank of several.
        step: in which it was read.
    """

    rank: int
    step: int


def first_nan(ranks: Sequence[RankTrace]) -> NanValue | None:
    """Return the first NaN that a rank read; None if no rank read one."""
    found = []
    for rank in ranks:
        if NAN_READ not in rank.names:
            continue
        counters = rank.events[rank.events["kind"] == Kind.COUNTER]
        steps = counters["step"][counters["name"] == rank.names.index(NAN_READ)]
        if len(steps):
            found.append((int(np.min(steps)), rank.rank))
    if not found:
        return None
    step, first = min(found)
    return NanValue(rank=first, step=step)
