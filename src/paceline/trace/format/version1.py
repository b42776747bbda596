"""Upgrades the events of a trace file of version 1 to the event model of version 2, in memory.

Version 1 knew a main and a communication lane, groups by name alone, and gave sends and receives
the sequence numbers of their group's collectives. In groups of three and more ranks that shifts
the numbers of ranks that exchange messages against the numbers of the other ranks. So collectives
are renumbered here, without counting the messages. Peers are ranks within their group: they are
global ranks only in a group of all ranks, which a single file cannot tell (see `merge`).
"""

from __future__ import annotations

import numpy as np

from paceline.trace.format.events import (
    COMMUNICATION,
    EVENT_DTYPE,
    MAIN,
    RECV,
    SEND,
    Group,
    Kind,
    Location,
    LocationType,
)

EVENT_DTYPE_V1 = np.dtype(
    [
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("amount", "<u8"),
        ("step", "<u4"),
        ("name", "<u4"),
        ("group", "<u4"),
        ("sequence", "<u4"),
        ("peer", "<i4"),
        ("kind", "u1"),
        ("lane", "u1"),
        ("reserved", "<u2"),
    ]
)
STEP_KIND_V1 = 0  # was a kind of event, and in the header it meant "between phases"
LAST_KIND_V1 = int(Kind.COUNTER)
_SAME_FIELDS = ("begin_ns", "end_ns", "amount", "step", "sequence", "peer", "name", "kind")

LOCATIONS = (
    Location(type=LocationType.THREAD, name="main"),
    Location(type=LocationType.COMMUNICATION, name="communication"),
)


def upgrade(events: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, tuple[Group, ...]]:
    """Return events of version 1 as those of version 2, and the groups that they refer to.

    Args:
        events: of `EVENT_DTYPE_V1`, as read.
        names: of the file; events name their group by one of them.
    """
    upgraded = np.zeros(len(events), EVENT_DTYPE)
    for field in _SAME_FIELDS:
        upgraded[field] = events[field]
    upgraded["location"] = np.where(events["lane"] == 0, MAIN, COMMUNICATION)
    upgraded["kind"][events["kind"] == STEP_KIND_V1] = Kind.STEP
    used = np.unique(events["group"])
    used = np.union1d(used, [0]).astype(np.int64)
    upgraded["group"] = np.searchsorted(used, events["group"])
    _separate_messages(upgraded, names)
    groups = tuple(Group(name=names[name] if names else "") for name in used.tolist())
    return upgraded, groups


def _separate_messages(events: np.ndarray, names: tuple[str, ...]) -> None:
    """Make messages of sends and receives, and number each group's collectives without them."""
    of_message = np.zeros(len(events), dtype=bool)
    for word, kind in ((SEND, Kind.SEND), (RECV, Kind.RECV)):
        if word not in names:
            continue
        named = events["name"] == names.index(word)
        of_message |= named
        events["kind"][named & (events["kind"] == Kind.COLLECTIVE)] = kind
    if not of_message.any():
        return
    messages = of_message & (events["kind"] != Kind.WAIT)
    for group in np.unique(events["group"][messages]).tolist():
        numbers = np.sort(events["sequence"][messages & (events["group"] == group)])
        others = ~of_message & (events["group"] == group) & (events["sequence"] > 0)
        events["sequence"][others] -= np.searchsorted(
            numbers, events["sequence"][others], side="left"
        ).astype(np.uint32)
        _number_messages(events, of_message & (events["group"] == group))


def _number_messages(events: np.ndarray, of_message: np.ndarray) -> None:
    """Number a group's messages by (direction, peer) from 1, and the waits for them alike.

    A message and the wait for it share one number of version 1, by which both are found.
    """
    own = np.flatnonzero(of_message)
    directions = events["name"][own].astype(np.int64)
    for direction, peer in {*zip(directions.tolist(), events["peer"][own].tolist(), strict=True)}:
        chosen = own[(directions == direction) & (events["peer"][own] == peer)]
        numbers = np.unique(events["sequence"][chosen])
        events["sequence"][chosen] = np.searchsorted(numbers, events["sequence"][chosen]) + 1
