"""Reads trace files: whole ones, and those of ranks that were killed, up to the last flush.

A file that was not closed and ends early is what a crash leaves, of a process or of its node; it is
read as far as it goes. A block whose checksum is wrong, or a closed file that is too short, is
damage and is an error that names the rank.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from paceline.core.errors import CorruptTrace, NotFound, StorageError
from paceline.native import crc32c
from paceline.trace.events import EVENT_DTYPE, FORMAT_VERSION, Kind

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIIIQQ40sIIIIQQQQ")
_BLOCK = struct.Struct("<IIII")
_MAGIC = b"PACETRCE"
_EVENTS, _NAMES = 1, 2
_MAX_BLOCK_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The header of a trace: who, and where in its run the rank is or ended."""

    rank: int
    world_size: int
    opened_monotonic_ns: int
    opened_realtime_ns: int
    boot_id: str
    step: int
    phase: Kind
    closed: bool
    error: int
    recorded_count: int
    dropped_count: int
    peak_memory_bytes: int
    written_bytes: int

    @property
    def phase_name(self) -> str:
        """The phase as people say it; between phases it is 'other'."""
        return "other" if self.phase is Kind.STEP else self.phase.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankTrace:
    """One rank's events in order of recording, with the names that they refer to."""

    status: Status
    events: np.ndarray
    names: tuple[str, ...]
    complete: bool

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.status.rank

    def of(self, kind: Kind) -> np.ndarray:
        """Return the events of `kind`, ordered by begin."""
        chosen: np.ndarray = self.events[self.events["kind"] == kind]
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
        return _parse_header(file.read(HEADER_BYTES), path)


def read_trace(path: Path) -> RankTrace:
    """Return all whole blocks of the trace at `path`.

    Raises:
        NotFound: there is no such file.
        CorruptTrace: a block is damaged, or a closed file is shorter than it says.
    """
    with _open(path) as file:
        data = file.read()
    status = _parse_header(data[:HEADER_BYTES], path)
    blocks: list[np.ndarray] = []
    names: list[str] = []
    at = HEADER_BYTES
    while at + _BLOCK.size <= len(data):
        kind, count, length, checksum = _BLOCK.unpack_from(data, at)
        body = at + _BLOCK.size
        if length > _MAX_BLOCK_BYTES or body + length > len(data):
            break  # the tail that a crash cut off; a closed file is judged below
        payload = memoryview(data)[body : body + length]
        if crc32c(payload, crc32c(data[at : at + 12])) != checksum:
            if _within(status, body + length):
                raise _corrupt(path, status.rank, f"wrong checksum in the block at byte {at}")
            break
        if kind == _EVENTS:
            blocks.append(_parse_events(payload, count, path, status.rank))
        elif kind == _NAMES:
            names.extend(_parse_names(payload, count, path, status.rank))
        at = body + length
    if status.closed and at < status.written_bytes:
        why = f"{status.written_bytes} bytes were written, {at} can be read"
        raise _corrupt(path, status.rank, why)
    events = np.concatenate(blocks) if blocks else np.empty(0, EVENT_DTYPE)
    _check_events(events, len(names), path, status.rank)
    return RankTrace(status=status, events=events, names=tuple(names), complete=status.closed)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFound("no such trace", where=str(path), fix="Give the folder of a run") from None
    except OSError as problem:
        why = problem.strerror or str(problem)
        raise StorageError(
            "cannot read trace", where=str(path), why=why, fix="Check that you may read it"
        ) from problem


def _within(status: Status, end: int) -> bool:
    return end <= status.written_bytes


def _parse_header(data: bytes, path: Path) -> Status:
    if len(data) < HEADER_BYTES or data[:8] != _MAGIC:
        raise CorruptTrace(
            "not a Paceline trace", where=str(path), fix="Move it out of the run's folder"
        )
    (_, version, rank, world_size, _, monotonic, realtime, boot_id, step, phase, closed, error) = (
        _HEADER.unpack_from(data)[:12]
    )
    recorded, dropped, peak, written = _HEADER.unpack_from(data)[12:]
    if version > FORMAT_VERSION:
        raise CorruptTrace(
            f"trace format version {version}",
            where=str(path),
            why=f"this Paceline reads up to {FORMAT_VERSION}",
            fix="Use a newer Paceline",
        )
    if phase not in set(Kind):
        raise _corrupt(path, rank, f"phase {phase} is not known")
    return Status(
        rank=rank,
        world_size=world_size,
        opened_monotonic_ns=monotonic,
        opened_realtime_ns=realtime,
        boot_id=boot_id.split(b"\0")[0].decode("ascii", "replace"),
        step=step,
        phase=Kind(phase),
        closed=bool(closed),
        error=error,
        recorded_count=recorded,
        dropped_count=dropped,
        peak_memory_bytes=peak,
        written_bytes=written,
    )


def _parse_events(payload: memoryview, count: int, path: Path, rank: int) -> np.ndarray:
    if len(payload) != count * EVENT_DTYPE.itemsize:
        raise _corrupt(path, rank, "an event block's length does not fit its count")
    return np.frombuffer(payload, EVENT_DTYPE)


def _parse_names(payload: memoryview, count: int, path: Path, rank: int) -> list[str]:
    names = []
    at = 0
    for _ in range(count):
        if at + 4 > len(payload):
            raise _corrupt(path, rank, "a name block is too short")
        (length,) = struct.unpack_from("<I", payload, at)
        names.append(bytes(payload[at + 4 : at + 4 + length]).decode("utf-8", "replace"))
        at += 4 + length
    return names


def _check_events(events: np.ndarray, name_count: int, path: Path, rank: int) -> None:
    """A checksum shows what was written, not that it makes sense: check before analyses trust."""
    if not len(events):
        return
    if int(events["name"].max()) >= name_count or int(events["group"].max()) >= name_count:
        raise _corrupt(path, rank, "an event refers to a name that the file does not hold")
    if int(events["kind"].max()) > max(Kind) or bool((events["end_ns"] < events["begin_ns"]).any()):
        raise _corrupt(path, rank, "an event is of an unknown kind or ends before it begins")


def _corrupt(path: Path, rank: int, why: str) -> CorruptTrace:
    return CorruptTrace(
        f"the trace of rank {rank} is damaged",
        where=str(path),
        why=why,
        fix="Restore the file, or move it away to analyse the other ranks",
    )
