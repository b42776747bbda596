"""A rank's events as OTF2 has them: regions of locations, and records at moments.

    event of the trace                 at its begin                      at its end
    -----------------------------------------------------------------------------------------------
    phase, step, wait, ...             ENTER                             LEAVE
    collective that blocks             MPI_COLLECTIVE_BEGIN              MPI_COLLECTIVE_END
    other collective                   NON_BLOCKING_COLLECTIVE_REQUEST   ..._COMPLETE
    send that blocks, other send       MPI_SEND, MPI_ISEND               -, MPI_ISEND_COMPLETE
    receive that blocks, other receive -, MPI_IRECV_REQUEST              MPI_RECV, MPI_IRECV
    put, get, accumulate               RMA_PUT, RMA_GET, RMA_ATOMIC      RMA_OP_COMPLETE_BLOCKING
    counter                            METRIC

Collectives and messages are records of the rank's main location, which stands for the rank in
communicators: in flight they overlap, and regions of a location do not. A call that blocks is a
region, too (its wait); the records lie within it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.trace.export.otf2_library import UNDEFINED
from paceline.trace.export.source import (
    COMMUNICATION_KINDS,
    ONE_SIDED,
    RankTimes,
    blocking_calls,
    times_of,
)
from paceline.trace.format.events import MAIN, Kind, LocationType

if TYPE_CHECKING:
    from paceline.trace.export.otf2_definitions import Otf2Definitions
    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge.clocks import ClockCorrection

# The rows that `native.write_otf2_events` takes; otf2_events.hpp.
SPAN_ROW = np.dtype(
    [("begin_ns", "<u8"), ("end_ns", "<u8"), ("region", "<u4"), ("reserved", "<u4")]
)
RECORD_ROW = np.dtype(
    [
        ("time_ns", "<u8"),
        ("bytes", "<u8"),
        ("received", "<u8"),
        ("request", "<u8"),
        ("object", "<u4"),
        ("peer", "<u4"),
        ("tag", "<u4"),
        ("kind", "u1"),
        ("at_end", "u1"),
        ("operation", "u1"),
        ("reserved", "u1"),
    ]
)


class RecordKind(IntEnum):
    """The kind of a record; the numbers are those of otf2_events.hpp."""

    NOTHING = 0
    SEND = 1
    ISEND = 2
    ISEND_COMPLETE = 3
    IRECV_REQUEST = 4
    IRECV = 5
    RECV = 6
    COLLECTIVE_BEGIN = 7
    COLLECTIVE_END = 8
    COLLECTIVE_REQUEST = 9
    COLLECTIVE_COMPLETE = 10
    METRIC = 11
    PUT = 12
    GET = 13
    ACCUMULATE = 14
    ACCESS_COMPLETE = 15


_ACCESSES = {"put": RecordKind.PUT, "get": RecordKind.GET, "accumulate": RecordKind.ACCUMULATE}

# OTF2_CollectiveOp. Making a communicator, a window or a file is a collective without bytes.
_CREATE_HANDLE = 17
COLLECTIVE_OPERATIONS = {
    "barrier": 0,
    "fence": 0,
    "open_fence": 0,
    "broadcast": 1,
    "gather": 2,
    "scatter": 4,
    "all_gather": 6,
    "neighbor_all_gather": 6,
    "all_to_all": 8,
    "neighbor_all_to_all": 8,
    "all_reduce": 11,
    "reduce": 12,
    "reduce_scatter": 13,
    "scan": 14,
    "make_communicator": _CREATE_HANDLE,
    "make_window": _CREATE_HANDLE,
    "open_file": _CREATE_HANDLE,
}
_UNKNOWN_OPERATION = 8  # OTF2 has no number for "other": all may have sent to all

_INSTANT = np.zeros(0, RECORD_ROW)


class Otf2Rank(NamedTuple):
    """What is written of a rank.

    Attributes:
        spans: by number of the location, `SPAN_ROW` in the order that the native writer wants.
        records: of the main location, `RECORD_ROW` in that order.
        first_ns: when the rank's first event began; None if it has none.
        last_ns: when its last event ended.
        unknown_peers: number of messages whose other side is not known: they are left out.
    """

    spans: dict[int, np.ndarray]
    records: np.ndarray
    first_ns: int | None
    last_ns: int
    unknown_peers: int


def convert_rank(
    rank: RankTrace, clock: ClockCorrection, definitions: Otf2Definitions, *, counters: bool
) -> Otf2Rank:
    """Return a rank's events as OTF2's; what they refer to is added to `definitions`.

    Cost: sorts the events; no object is made per event.
    """
    times = times_of(rank, clock)
    blocking, waits = blocking_calls(rank)
    kinds = rank.events["kind"]
    communicates = np.isin(kinds, COMMUNICATION_KINDS)
    spans = _spans(rank, times, waits, ~communicates & (kinds != Kind.COUNTER), definitions)
    parts, unknown = _communication(rank, times, blocking, definitions)
    if counters:
        parts.append(_metrics(rank, times, definitions))
    records = np.concatenate(parts) if parts else _INSTANT
    records = records[np.lexsort((records["at_end"] == 0, records["time_ns"]))]
    return Otf2Rank(
        spans=spans,
        records=records,
        first_ns=int(times.begin_ns.min()) if len(kinds) else None,
        last_ns=int(times.end_ns.max()) if len(kinds) else 0,
        unknown_peers=unknown,
    )


def _spans(
    rank: RankTrace,
    times: RankTimes,
    waits: np.ndarray,
    chosen: np.ndarray,
    definitions: Otf2Definitions,
) -> dict[int, np.ndarray]:
    """Return the regions of each location."""
    events = rank.events
    names, kinds = events["name"].astype(np.int64), events["kind"].astype(np.int64)
    keys = (names << 9) | (kinds << 1) | waits
    used = np.zeros(max(1, len(rank.names)) << 9, dtype=bool)
    used[keys[chosen]] = True
    regions = np.zeros(len(used), dtype=np.uint32)
    for key in np.flatnonzero(used).tolist():
        name, kind = rank.names[key >> 9], Kind((key >> 1) & 0xFF)
        regions[key] = definitions.region(name, kind, is_call=bool(key & 1))
    locations = np.where(_on_lane(rank)[events["location"]], MAIN, events["location"])
    found = {}
    for location in np.unique(locations[chosen]).tolist():
        rows = np.flatnonzero(chosen & (locations == location))[::-1]  # enclosing spans come last
        begin_ns, end_ns = times.begin_ns[rows], times.end_ns[rows]
        order = np.lexsort((-end_ns, begin_ns))
        spans = np.zeros(len(rows), SPAN_ROW)
        spans["begin_ns"], spans["end_ns"] = begin_ns[order], end_ns[order]
        spans["region"] = regions[keys[rows[order]]]
        found[location] = spans
    return found


def _on_lane(rank: RankTrace) -> np.ndarray:
    """Return which of the rank's locations are lanes of communication."""
    types = [location.type is LocationType.COMMUNICATION for location in rank.locations]
    return np.array(types or [False], dtype=bool)


def _communication(
    rank: RankTrace, times: RankTimes, blocking: np.ndarray, definitions: Otf2Definitions
) -> tuple[list[np.ndarray], int]:
    """Return the records of collectives and messages, and how many lack their other side."""
    events = rank.events
    peers = np.full(len(events), UNDEFINED, dtype=np.uint32)
    sizes = np.ones(len(events), dtype=np.int64)
    communicators = np.zeros(len(events), dtype=np.uint32)
    rows = np.flatnonzero(np.isin(events["kind"], COMMUNICATION_KINDS))
    groups = events["group"][rows]
    for group in np.unique(groups).tolist():
        communicator = definitions.communicator(rank.groups[group])
        own = rows[groups == group]
        communicators[own] = communicator.reference
        sizes[own] = len(communicator.members)
        peers[own] = communicator.ranks_of(events["peer"][own])
    parts: list[np.ndarray] = []
    collectives = rows[events["kind"][rows] == Kind.COLLECTIVE]
    parts += _collectives(rank, times, blocking, collectives, communicators, peers, sizes)
    messages = rows[events["kind"][rows] != Kind.COLLECTIVE]
    known = peers[messages] != UNDEFINED
    parts += _messages(rank, times, blocking, messages[known], communicators, peers, definitions)
    return parts, int((~known).sum())


def _rows_of(times_ns: np.ndarray, events: np.ndarray, requests: np.ndarray) -> np.ndarray:
    """Return records with what most of them need."""
    records = np.zeros(len(events), RECORD_ROW)
    records["time_ns"], records["bytes"] = times_ns, events["amount"]
    records["request"] = requests
    records["tag"] = events["tag"]
    return records


def _collectives(
    rank: RankTrace,
    times: RankTimes,
    blocking: np.ndarray,
    rows: np.ndarray,
    communicators: np.ndarray,
    roots: np.ndarray,
    sizes: np.ndarray,
) -> list[np.ndarray]:
    events = rank.events[rows]
    begins, ends = (_rows_of(side[rows], events, rows + 1) for side in times)
    names = events["name"]
    for name in np.unique(names).tolist():
        own = names == name
        word = rank.names[name]
        ends["operation"][own] = COLLECTIVE_OPERATIONS.get(word, _UNKNOWN_OPERATION)
        is_root = events["peer"][own] == rank.rank
        given = events["amount"][own].astype(np.int64)
        ends["bytes"][own], ends["received"][own] = exchanged(
            word, given, sizes[rows][own], is_root
        )
    ends["object"], ends["peer"] = communicators[rows], roots[rows]
    calls = blocking[rows]
    begins["kind"] = np.where(calls, RecordKind.COLLECTIVE_BEGIN, RecordKind.COLLECTIVE_REQUEST)
    ends["kind"] = np.where(calls, RecordKind.COLLECTIVE_END, RecordKind.COLLECTIVE_COMPLETE)
    ends["at_end"] = ends["time_ns"] > begins["time_ns"]
    return [begins, ends]


def exchanged(
    operation: str, given: np.ndarray, sizes: np.ndarray, is_root: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that a rank gives to collectives, and those that it gets from them.

    >>> ones = np.ones(2, dtype=np.int64)
    >>> exchanged("broadcast", 8 * ones, 4 * ones, np.array([True, False]))
    (array([8, 0]), array([0, 8]))

    Args:
        operation: that all of them are.
        given: `amount` of their events, bytes, shape (calls,).
        sizes: number of ranks in the group, shape (calls,).
        is_root: whether this rank is the root, shape (calls,).
    """
    nothing = np.zeros_like(given)
    if operation == "broadcast":
        return np.where(is_root, given, nothing), np.where(is_root, nothing, given)
    if operation == "reduce":
        return given, np.where(is_root, given, nothing)
    if operation == "gather":
        return given, np.where(is_root, given * sizes, nothing)
    if operation == "scatter":  # the amount is what a rank gets
        return np.where(is_root, given * sizes, nothing), given
    if operation == "all_gather":
        return given, given * sizes
    if operation == "reduce_scatter":
        return given, given // np.maximum(sizes, 1)
    return given, given


def _messages(
    rank: RankTrace,
    times: RankTimes,
    blocking: np.ndarray,
    rows: np.ndarray,
    communicators: np.ndarray,
    peers: np.ndarray,
    definitions: Otf2Definitions,
) -> list[np.ndarray]:
    events = rank.events[rows]
    begins, ends = (_rows_of(side[rows], events, rows + 1) for side in times)
    for side in (begins, ends):
        side["object"], side["peer"] = communicators[rows], peers[rows]
    sends, calls = events["kind"] == Kind.SEND, blocking[rows]
    begins["kind"] = np.where(
        sends,
        np.where(calls, RecordKind.SEND, RecordKind.ISEND),
        np.where(calls, RecordKind.NOTHING, RecordKind.IRECV_REQUEST),
    )
    ends["kind"] = np.where(
        sends,
        np.where(calls, RecordKind.NOTHING, RecordKind.ISEND_COMPLETE),
        np.where(calls, RecordKind.RECV, RecordKind.IRECV),
    )
    for word in ONE_SIDED:
        if word not in rank.names:
            continue
        own = events["name"] == rank.names.index(word)
        begins["kind"][own], ends["kind"][own] = _ACCESSES[word], RecordKind.ACCESS_COMPLETE
        for group in np.unique(events["group"][own]).tolist():
            window = definitions.window(rank.groups[group])
            for side in (begins, ends):
                side["object"][own & (events["group"] == group)] = window
    ends["at_end"] = ends["time_ns"] > begins["time_ns"]
    return [side[side["kind"] != RecordKind.NOTHING] for side in (begins, ends)]


def _metrics(rank: RankTrace, times: RankTimes, definitions: Otf2Definitions) -> np.ndarray:
    rows = np.flatnonzero(rank.events["kind"] == Kind.COUNTER)
    events = rank.events[rows]
    records = _rows_of(times.begin_ns[rows], events, rows)
    records["kind"] = RecordKind.METRIC
    for name in np.unique(events["name"]).tolist():
        records["object"][events["name"] == name] = definitions.metric(rank.names[name])
    return records
