"""Collective instances as an array: when the ranks of each entered it, and when it was complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.events import ROOTED

if TYPE_CHECKING:
    from paceline.trace.matching import Matches

NO_TIME = np.iinfo(np.int64).min

# Times are on the run's clock, `NO_TIME` for a root that is not known or left no trace.
INSTANCE = np.dtype(
    [
        ("first_ns", "<i8"),  # when its first rank entered
        ("last_ns", "<i8"),  # when its last rank entered
        ("root_ns", "<i8"),  # when its root entered
        ("complete_ns", "<i8"),  # when its last rank had its result
        ("largest", "<i8"),  # bytes that a rank gave, at most
        ("mean", "<f8"),  # bytes that a rank gave
        ("sequence", "<i8"),
        ("group", "<i4"),
        ("operation", "<i4"),
        ("ranks", "<i4"),  # how many joined
        ("agrees", "?"),  # whether they agree on operation and bytes
        ("timed", "?"),  # whether each of them saw it complete
    ]
)


def time_instances(matches: Matches) -> np.ndarray:
    """Return the instances with their times, from calls whose times are on the run's clock."""
    instances = matches.instances.copy()
    if not len(instances):
        return instances
    calls, first = matches.calls[matches.by_instance], matches.instance_starts[:-1]
    instances["first_ns"] = np.minimum.reduceat(calls["enter_ns"], first)
    instances["last_ns"] = np.maximum.reduceat(calls["enter_ns"], first)
    instances["complete_ns"] = np.maximum.reduceat(calls["exit_ns"], first)
    instances["largest"] = np.maximum.reduceat(calls["amount"], first)
    instances["mean"] = np.add.reduceat(calls["amount"], first) / instances["ranks"]
    instances["timed"] = np.logical_and.reduceat(calls["timed"], first)
    instances["root_ns"] = NO_TIME
    roots = np.flatnonzero(
        (matches.ranks[calls["rank"]] == calls["peer"]) & matches.are(ROOTED)[calls["operation"]]
    )
    instances["root_ns"][calls["instance"][roots]] = calls["enter_ns"][roots]
    return instances
