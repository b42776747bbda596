"""The header of a trace file: its first page, which the recorder maps and updates in place.

Its fixed part has a checksum from the start; its live part changes until the file is closed, and
has one from then on. Version 1 had neither.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import CorruptTrace
from paceline.native import crc32c
from paceline.trace.format.events import FORMAT_VERSION, IDLE, Kind

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES = 4096
# The fixed part, then the live one.
HEADER = struct.Struct("<8sIIIIQQ40sIIIIQQQQI")
FIXED_CHECKSUM_AT, FIXED_END, LIVE_END = 20, 80, 128
_MAGIC = b"PACETRCE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The header of a trace: the rank, and its current or last step and phase.

    Attributes:
        phase: kind of event that the rank is in; None between phases.
    """

    version: int
    rank: int
    world_size: int
    opened_monotonic_ns: int
    opened_realtime_ns: int
    boot_id: str
    step: int
    phase: Kind | None
    closed: bool
    error: int
    recorded_count: int
    dropped_count: int
    peak_memory_bytes: int
    written_bytes: int

    @property
    def phase_name(self) -> str:
        """The phase as people say it; between phases it is 'other'."""
        return "other" if self.phase is None else self.phase.name.lower()


def parse_header(data: bytes, path: Path) -> Status:
    """Return the header in the first page of the file at `path`.

    Raises:
        CorruptTrace: it is not a trace, damaged, or of a newer format.
    """
    if len(data) < HEADER_BYTES or data[:8] != _MAGIC:
        raise CorruptTrace(
            "not a Paceline trace", where=str(path), fix="Move it out of the run's folder"
        )
    fields = HEADER.unpack_from(data)
    _, version, rank, world_size, fixed, monotonic, realtime, boot_id = fields[:8]
    step, phase, closed, error, recorded, dropped, peak, written, live = fields[8:]
    if version > FORMAT_VERSION:
        raise CorruptTrace(
            f"trace format version {version}",
            where=str(path),
            why=f"this Paceline reads up to {FORMAT_VERSION}",
            fix="Use a newer Paceline",
        )
    if version == 0:
        raise corrupt(path, rank, "format version 0")
    if version > 1:
        _check_header(data, fixed, live if closed else None, path, rank)
    if phase != IDLE and phase not in set(Kind):
        raise corrupt(path, rank, f"phase {phase} is not known")
    return Status(
        version=version,
        rank=rank,
        world_size=world_size,
        opened_monotonic_ns=monotonic,
        opened_realtime_ns=realtime,
        boot_id=boot_id.split(b"\0")[0].decode("ascii", "replace"),
        step=step,
        phase=None if phase == IDLE else Kind(phase),
        closed=bool(closed),
        error=error,
        recorded_count=recorded,
        dropped_count=dropped,
        peak_memory_bytes=peak,
        written_bytes=written,
    )


def _check_header(data: bytes, fixed: int, live: int | None, path: Path, rank: int) -> None:
    """Check the fixed part always, and the live one once it no longer changes."""
    after = data[FIXED_CHECKSUM_AT + 4 : FIXED_END]
    if crc32c(after, crc32c(data[:FIXED_CHECKSUM_AT])) != fixed:
        raise corrupt(path, rank, "wrong checksum of the header's fixed part")
    if live is not None and crc32c(data[FIXED_END:LIVE_END]) != live:
        raise corrupt(path, rank, "wrong checksum of the header's live part")


def corrupt(path: Path, rank: int, why: str) -> CorruptTrace:
    """Return the error for a file that is a trace, of `rank`, and damaged."""
    return CorruptTrace(
        f"the trace of rank {rank} is damaged",
        where=str(path),
        why=why,
        fix="Restore the file, or move it away to analyse the other ranks",
    )
