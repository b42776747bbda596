"""Writes a rank's trace from events that are known already: of a simulation, or of another tool.

A rank of a run records through the collectors. Here names and groups are given as text, and times
are of any clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from paceline.native import Recorder
from paceline.trace.format.events import MAIN, Kind
from paceline.trace.format.files import trace_name

if TYPE_CHECKING:
    from pathlib import Path

_FLUSH_S = 60.0


class EventFields(NamedTuple):
    """What an event says beside its kind, name, step and time; see `EVENT_DTYPE`."""

    amount: int = 0
    group: str = ""
    sequence: int = 0
    peer: int = -1
    tag: int = 0
    location: int = MAIN


_NO_FIELDS = EventFields()


class TraceWriter:
    """The trace of one rank, in a folder of traces; used as a context, which closes the file."""

    def __init__(self, folder: Path, rank: int, world_size: int, most_events: int) -> None:
        """Make the file; one of an older run in its place is replaced.

        Args:
            folder: of the run's traces; it is there.
            rank: global number.
            world_size: ranks of the run.
            most_events: at most so many are written.

        Raises:
            StorageError: the file cannot be made.
        """
        path = folder / trace_name(rank)
        path.unlink(missing_ok=True)
        self._recorder = Recorder(
            str(path), rank, world_size, buffer_events=most_events + 16, flush_interval_s=_FLUSH_S
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._recorder.flush()
        self._recorder.close()

    def write(
        self,
        kind: Kind,
        name: str,
        step: int,
        span_ns: tuple[int, int],
        fields: EventFields = _NO_FIELDS,
    ) -> None:
        """Write an event; `span_ns` is its begin and end."""
        recorder = self._recorder
        recorder.record(
            int(kind),
            fields.location,
            recorder.intern(name),
            *span_ns,
            fields.amount,
            recorder.define_group(fields.group, ()),
            fields.sequence,
            fields.peer,
            fields.tag,
            step,
            0,
        )
