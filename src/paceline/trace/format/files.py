"""Reads trace files: complete ones, and those of ranks that were killed, up to the last flush.

A crash of a process or of its node leaves a file that is not closed and may end early; it is read
up to its last complete block. A wrong checksum, or a closed file that is too short, is an error
that names the rank. Files of version 1 are upgraded as they are read (`version1`). Versions 2 and 3
differ in their blocks of events alone: as they are in memory, or packed by the native core.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from paceline.core.errors import CorruptTrace, NotFound, storage_errors
from paceline.native import crc32c, unpack_events
from paceline.trace.format import version1
from paceline.trace.format.events import EVENT_DTYPE, IDLE, Group, Kind, Location, LocationType
from paceline.trace.format.header import HEADER_BYTES, Status, corrupt, parse_header

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = struct.Struct("<IIII")
LOCATION = struct.Struct("<IIII")
_EVENTS, _NAMES, _GROUPS, _LOCATIONS, _PACKED_EVENTS = 1, 2, 3, 4, 5
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankTrace:
    """One rank's events in order of recording, with the tables that they refer to.

    Attributes:
        status: the file's header.
        events: array of `EVENT_DTYPE`, shape (events,).
        names: names of events by number; the first is empty and means none.
        groups: process groups by number; the first has no name and means none.
        locations: locations by number; the first is the thread of the training loop.
        complete: whether the file was closed, rather than truncated.
        step_rule: what ends a step, as `merge.steps` found it; empty before, and without steps.
        marks_within_steps: number of recorded steps that `merge.steps` joined to the one after.
    """

    status: Status
    events: np.ndarray
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    locations: tuple[Location, ...]
    complete: bool
    step_rule: str = ""
    marks_within_steps: int = 0

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.status.rank

    def events_of(self, *kinds: Kind) -> np.ndarray:
        """Return the events of `kinds`, ordered by begin time."""
        wanted = np.zeros(256, dtype=bool)  # a kind is a byte
        wanted[list(kinds)] = True
        chosen: np.ndarray = self.events[wanted[self.events["kind"]]]
        return chosen[np.argsort(chosen["begin_ns"], kind="stable")]


def trace_name(rank: int) -> str:
    """Return the file name of a rank's trace."""
    return f"rank-{rank:05d}.trace"


def read_status(path: Path) -> Status:
    """Return the header of a trace; also of one that is being written.

    Raises:
        NotFound: there is no such file.
        CorruptTrace: it is not a trace, or of a newer format.
    """
    with _open(path) as file:
        return parse_header(file.read(HEADER_BYTES), path)


def read_trace(path: Path) -> RankTrace:
    """Return all complete blocks of the trace at `path`.

    Raises:
        NotFound: there is no such file.
        CorruptTrace: a block or the header is damaged, or a closed file is shorter than it says.
    """
    with _open(path) as file:
        data = file.read()
    status = parse_header(data[:HEADER_BYTES], path)
    tables = _Tables(path, status)
    at = HEADER_BYTES
    while at + BLOCK.size <= len(data):
        kind, count, length, checksum = BLOCK.unpack_from(data, at)
        body = at + BLOCK.size
        if length > _MAX_BLOCK_BYTES or body + length > len(data):
            break  # the tail that a crash cut off; a closed file is judged below
        payload = memoryview(data)[body : body + length]
        if crc32c(payload, crc32c(data[at : at + 12])) != checksum:
            if body + length <= status.written_bytes:
                raise corrupt(path, status.rank, f"wrong checksum in the block at byte {at}")
            break
        tables.add(kind, count, payload)
        at = body + length
    if status.closed and at < status.written_bytes:
        why = f"{status.written_bytes} bytes were written, {at} can be read"
        raise corrupt(path, status.rank, why)
    return tables.finish()


def read_tables(path: Path) -> RankTrace:
    """Return the tables of a trace without its events; also of one that is being written.

    Raises:
        NotFound: there is no such file.
        CorruptTrace: it is not a trace, or a table is damaged.
    """
    with _open(path) as file:
        status = parse_header(file.read(HEADER_BYTES), path)
        tables = _Tables(path, status)
        while len(head := file.read(BLOCK.size)) == BLOCK.size:
            kind, count, length, checksum = BLOCK.unpack(head)
            if kind in (_EVENTS, _PACKED_EVENTS):
                file.seek(length, os.SEEK_CUR)
                continue
            payload = memoryview(file.read(length))
            if crc32c(payload, crc32c(head[:12])) != checksum:  # it is just being written
                break
            tables.add(kind, count, payload)
    return tables.finish()


class _Tables:
    """The tables and events of one file, collected from its blocks."""

    def __init__(self, path: Path, status: Status) -> None:
        self.path = path
        self.status = status
        self.blocks: list[np.ndarray] = []
        self.names: list[str] = []
        self.groups: list[Group] = []
        self.locations: list[Location] = []

    def add(self, kind: int, count: int, payload: memoryview) -> None:
        """Parse a block; blocks of later formats are skipped."""
        if kind == _EVENTS:
            self.blocks.append(self._parse_events(payload, count))
        elif kind == _PACKED_EVENTS:
            self.blocks.append(self._unpack_events(payload, count))
        elif kind == _NAMES:
            self.names.extend(self._parse_names(payload, count))
        elif kind == _GROUPS:
            self.groups.extend(self._parse_groups(payload, count))
        elif kind == _LOCATIONS:
            self.locations.extend(self._parse_locations(payload, count))

    def finish(self) -> RankTrace:
        """Return the rank's trace, upgraded and checked: analyses trust what it refers to."""
        old = self.status.version == 1
        dtype = version1.EVENT_DTYPE_V1 if old else EVENT_DTYPE
        events = np.concatenate(self.blocks) if self.blocks else np.empty(0, dtype)
        self._check(events, "name", len(self.names))
        if old:
            self._check(events, "group", len(self.names))
            kinds = events["kind"]
            if len(kinds) and int(kinds.max()) > version1.LAST_KIND_V1:
                raise self._corrupt("an event is of an unknown kind")
            events, groups = version1.upgrade(events, tuple(self.names))
            self.groups, self.locations = list(groups), list(version1.LOCATIONS)
        self._check(events, "group", len(self.groups))
        self._check(events, "location", len(self.locations))
        self._check_kinds_and_times(events)
        return RankTrace(
            status=self.status,
            events=events,
            names=tuple(self.names),
            groups=tuple(self.groups),
            locations=tuple(self.locations),
            complete=self.status.closed,
        )

    def _check(self, events: np.ndarray, table: str, count: int) -> None:
        """Check what a checksum cannot: that references are valid."""
        if len(events) and int(events[table].max()) >= count:
            raise self._corrupt(f"an event refers to a {table} that the file does not hold")

    def _check_kinds_and_times(self, events: np.ndarray) -> None:
        if not len(events):
            return
        kinds = events["kind"]
        if int(kinds.max()) > max(Kind) or int(kinds.min()) == IDLE:
            raise self._corrupt("an event is of an unknown kind")
        if bool((events["end_ns"] < events["begin_ns"]).any()):
            raise self._corrupt("an event ends before it begins")

    def _parse_events(self, payload: memoryview, count: int) -> np.ndarray:
        dtype = version1.EVENT_DTYPE_V1 if self.status.version == 1 else EVENT_DTYPE
        if len(payload) != count * dtype.itemsize:
            raise self._corrupt("an event block's length does not fit its count")
        return np.frombuffer(payload, dtype)

    def _unpack_events(self, payload: memoryview, count: int) -> np.ndarray:
        try:
            return np.frombuffer(unpack_events(payload, count), EVENT_DTYPE)
        except ValueError:
            why = "an event block's bytes are not those of its count of events"
            raise self._corrupt(why) from None

    def _parse_names(self, payload: memoryview, count: int) -> list[str]:
        names = []
        at = 0
        for _ in range(count):
            (length,) = self._words(payload, at, 1, "name")
            text = payload[at + 4 : at + 4 + length]
            names.append(bytes(text).decode("utf-8", "replace"))
            at += 4 + length
        return names

    def _parse_groups(self, payload: memoryview, count: int) -> list[Group]:
        groups = []
        at = 0
        for _ in range(count):
            name, members = self._words(payload, at, 2, "group")
            ranks = self._words(payload, at + 8, members, "group")
            groups.append(Group(name=self._name(name), members=ranks))
            at += 8 + 4 * members
        return groups

    def _parse_locations(self, payload: memoryview, count: int) -> list[Location]:
        if len(payload) != count * LOCATION.size:
            raise self._corrupt("a location block's length does not fit its count")
        locations = []
        for kind, name, process, number in LOCATION.iter_unpack(payload):
            if kind not in set(LocationType):
                raise self._corrupt(f"location type {kind} is not known")
            locations.append(
                Location(
                    type=LocationType(kind), name=self._name(name), process=process, number=number
                )
            )
        return locations

    def _name(self, number: int) -> str:
        if number >= len(self.names):
            raise self._corrupt("a definition refers to a name that the file does not hold")
        return self.names[number]

    def _words(self, payload: memoryview, at: int, count: int, what: str) -> tuple[int, ...]:
        if at + 4 * count > len(payload):
            raise self._corrupt(f"a {what} block is too short")
        return struct.unpack_from(f"<{count}I", payload, at)

    def _corrupt(self, why: str) -> CorruptTrace:
        return corrupt(self.path, self.status.rank, why)


def _open(path: Path) -> BinaryIO:
    with storage_errors("cannot read trace", where=path, fix="Check that you may read it"):
        try:
            return path.open("rb")
        except FileNotFoundError:
            raise NotFound(
                "no such trace", where=str(path), fix="Give the folder of a run"
            ) from None
