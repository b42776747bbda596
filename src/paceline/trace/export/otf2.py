"""Writes a run as an OTF2 archive: what Vampir, Scalasca, Cube and otf2-print read.

A rank is a location group (a process) below its node, its threads and streams are locations; which
event becomes what stands in `otf2_events`. Times are nanoseconds on the run's clock. The archive is
complete or not there: it is written under another name, which is changed at the end.

Format: Open Trace Format 2, version 3 (Eschweiler and others, 2012), through its own library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import storage_errors
from paceline.core.files import replaced_folder
from paceline.native import write_otf2_events
from paceline.trace.export.otf2_definitions import Definition, Otf2Definitions
from paceline.trace.export.otf2_events import RECORD_ROW, SPAN_ROW, convert_rank
from paceline.trace.export.otf2_library import UNDEFINED, Otf2Archive
from paceline.trace.export.source import ExportSummary
from paceline.trace.format.events import MAIN, LocationType

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.trace.export.otf2_events import Otf2Rank
    from paceline.trace.export.source import TraceSource
    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge.clocks import ClockCorrection

ARCHIVE_NAME = "traces"  # the files of the archive: what tools look for
_TICKS_PER_S = 1_000_000_000
_PROCESS, _CPU_THREAD, _ACCELERATOR_STREAM = 1, 1, 2
_SHARED_MEMORY = 1  # domain of a node of the system tree
_NO_SPANS, _NO_RECORDS = np.zeros(0, SPAN_ROW), np.zeros(0, RECORD_ROW)


def write_otf2(
    trace: TraceSource,
    folder: Path,
    *,
    counters: bool = True,
    on_rank: Callable[[int], None] | None = None,
) -> ExportSummary:
    """Write a run as an archive.

    Args:
        trace: the run's ranks.
        folder: of the archive; one that is there is replaced.
        counters: whether they are written, as metrics; some readers (Pipit) fail at them.
        on_rank: is called with the number of ranks that are written, after each.

    Raises:
        Missing: there is no OTF2.
        StorageError: the archive cannot be written; what was there before is unchanged.
    Cost: the events of one rank in memory, twice.
    """
    fix = "Free space, or choose another folder"
    with (
        storage_errors("cannot write the archive", where=folder, fix=fix),
        replaced_folder(folder) as partial,
        Otf2Archive(partial, ARCHIVE_NAME, folder) as archive,
    ):
        done = _Writing(archive, trace.world_size, counters=counters)
        for rank, clock in zip(trace.ranks, trace.clocks, strict=True):
            done.add(rank, clock)
            if on_rank is not None:
                on_rank(done.ranks)
        done.finish()
    return ExportSummary(
        path=folder / f"{ARCHIVE_NAME}.otf2",
        ranks=done.ranks,
        events=done.events,
        cautions=done.cautions(),
    )


@dataclass(frozen=True, slots=True)
class _DefinedLocation:
    """A location as it is defined at the end."""

    reference: int
    rank: int
    name: str
    type: int
    events: int


class _Writing:
    """An archive that is written, rank by rank."""

    def __init__(self, archive: Otf2Archive, world_size: int, *, counters: bool) -> None:
        self.archive = archive
        self.definitions = Otf2Definitions(world_size)
        self.counters = counters
        self.places: list[_DefinedLocation] = []
        self.nodes: dict[str, list[int]] = {}  # ranks by boot id
        self.first_ns: int | None = None
        self.last_ns = 0
        self.realtime_offset_ns = 0  # from the run's clock to that of the wall
        self.ranks = self.events = self.clipped = self.clipped_ns = 0
        self.unknown_peers = 0

    def add(self, rank: RankTrace, clock: ClockCorrection) -> None:
        """Write the events of a rank."""
        if not self.ranks:
            status = rank.status
            self.realtime_offset_ns = status.opened_realtime_ns - clock.to_run_ns(
                status.opened_monotonic_ns
            )
        self.ranks += 1
        self.nodes.setdefault(rank.status.boot_id, []).append(rank.rank)
        converted = convert_rank(rank, clock, self.definitions, counters=self.counters)
        self.unknown_peers += converted.unknown_peers
        if converted.first_ns is not None:
            first = self.first_ns
            self.first_ns = converted.first_ns if first is None else min(first, converted.first_ns)
            self.last_ns = max(self.last_ns, converted.last_ns)
        for number in {MAIN, *converted.spans}:
            self._write_location(rank, number, converted)

    def _write_location(self, rank: RankTrace, number: int, converted: Otf2Rank) -> None:
        location = rank.locations[number] if number < len(rank.locations) else None
        reference = _location_reference(rank.rank, number)
        events = self._write_events(
            reference,
            converted.spans.get(number, _NO_SPANS),
            converted.records if number == MAIN else _NO_RECORDS,
        )
        is_stream = location is not None and location.type is LocationType.STREAM
        self.places.append(
            _DefinedLocation(
                reference=reference,
                rank=rank.rank,
                name=location.name if location is not None else "main",
                type=_ACCELERATOR_STREAM if is_stream else _CPU_THREAD,
                events=events,
            )
        )

    def _write_events(self, reference: int, spans: np.ndarray, records: np.ndarray) -> int:
        writer = self.archive.event_writer(reference)
        written = write_otf2_events(self.archive.library, writer, spans, records)
        self.archive.check(written.error, f"the events of location {reference}")
        self.archive.close_event_writer(writer)
        self.events += written.events
        self.clipped += written.clipped
        self.clipped_ns += written.clipped_ns
        return written.events

    def finish(self) -> None:
        """Write the definitions. Ranks without a trace are locations without events."""
        found = {place.rank for place in self.places}
        for rank in sorted(set(range(self.definitions.world_size)) - found):
            self._write_events(rank, _NO_SPANS, _NO_RECORDS)
            self.places.append(_DefinedLocation(rank, rank, "main (no trace)", _CPU_THREAD, 0))
        self.places.sort(key=lambda place: (place.rank, place.reference))
        self.archive.close_events([place.reference for place in self.places])
        first = self.first_ns or 0
        clock: Definition = (
            *("ClockProperties", _TICKS_PER_S, first, max(self.last_ns - first, 0)),
            max(first + self.realtime_offset_ns, 0),
        )
        main = np.arange(self.definitions.world_size)  # a main location has the rank's number
        others = [*self._system_tree(), *self.definitions.rows(main)]
        for definition in (clock, *self.definitions.strings(), *others):
            self.archive.define(*definition)

    def cautions(self) -> tuple[str, ...]:
        """Return what could not be written as it is in the trace."""
        found = []
        if self.clipped:
            found.append(
                f"{self.clipped:,} regions ended after the region around them, and were cut there: "
                f"by {self.clipped_ns / 1e6:.3g} ms in all"
            )
        if self.unknown_peers:
            found.append(
                f"{self.unknown_peers:,} messages were left out: the trace does not know their "
                "other side"
            )
        return tuple(found)

    def _system_tree(self) -> list[Definition]:
        """Return nodes, processes and their locations."""
        string = self.definitions.string
        rows: list[Definition] = [
            ("SystemTreeNode", 0, string("machine"), string("machine"), UNDEFINED)
        ]
        parents: dict[int, int] = {}
        for number, ranks in enumerate(self.nodes.values(), start=1):
            name = string(f"node {number - 1}")
            rows.append(("SystemTreeNode", number, name, string("node"), 0))
            rows.append(("SystemTreeNodeDomain", number, _SHARED_MEMORY))
            parents.update(dict.fromkeys(ranks, number))
        defined: set[int] = set()
        for place in self.places:
            if place.rank not in defined:
                defined.add(place.rank)
                name = string(f"rank {place.rank}")
                parent = parents.get(place.rank, 0)
                rows.append(("LocationGroup", place.rank, name, _PROCESS, parent, UNDEFINED))
            name = string(place.name)
            rows.append(("Location", place.reference, name, place.type, place.events, place.rank))
        return rows


def _location_reference(rank: int, number: int) -> int:
    """Return the reference of a location: of the main thread it is the rank."""
    return rank if number == MAIN else number << 32 | rank
