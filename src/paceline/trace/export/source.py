"""What a writer needs of a run's traces, and what all writers take from a rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # a field's type
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge import Trace
    from paceline.trace.merge.clocks import ClockCorrection
    from paceline.trace.merge.windows import SpooledRun

COMMUNICATION_KINDS = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
ONE_SIDED = ("put", "get", "accumulate")  # names of messages that their origin alone records


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSummary:
    """What a writer wrote.

    Attributes:
        path: of the file to open; of the folder, if there is a file per rank.
        ranks: number of ranks whose events were written.
        events: number of events in terms of the format.
        cautions: what the format could not hold, a sentence each.
    """

    path: Path
    ranks: int
    events: int
    cautions: tuple[str, ...] = ()


class TraceSource(Protocol):
    """The ranks of a run, in order: a merged `Trace`, or what loads a rank when it is asked for."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the run, including ranks that left no trace."""
        ...

    @property
    def ranks(self) -> Iterable[RankTrace]:
        """The trace of each rank that left one, ordered by rank."""
        ...

    @property
    def clocks(self) -> Iterable[ClockCorrection]:
        """The clock correction of each trace."""
        ...


class SpooledSource:
    """A run whose events are in a temporary file: its ranks are read one at a time."""

    def __init__(self, spooled: SpooledRun) -> None:
        """Read from `spooled`, which stays open."""
        self._spooled = spooled
        self.clocks = spooled.clocks
        self.world_size = spooled.world_size

    @property
    def ranks(self) -> Iterator[RankTrace]:
        """The trace of each rank that left one, ordered by rank; read anew each time."""
        return self._spooled.each_rank()


class RankTimes(NamedTuple):
    """When a rank's events began and ended, on the run's clock, ns; each of shape (events,)."""

    begin_ns: np.ndarray
    end_ns: np.ndarray


def times_of(rank: RankTrace, clock: ClockCorrection) -> RankTimes:
    """Return the times of a rank's events on the run's clock; no event ends before it begins."""
    begin_ns = clock.to_run_ns(rank.events["begin_ns"])
    return RankTimes(begin_ns, np.maximum(clock.to_run_ns(rank.events["end_ns"]), begin_ns))


def first_ns(trace: TraceSource) -> int:
    """Return when the run's first event began, on the run's clock."""
    begins = [
        int(clock.to_run_ns(rank.events["begin_ns"]).min())
        for rank, clock in zip(trace.ranks, trace.clocks, strict=True)
        if len(rank.events)
    ]
    return min(begins, default=0)


def message_rows(trace: Trace, index: int) -> np.ndarray:
    """Return for each message of a rank the row of its event.

    Args:
        trace: a merged trace.
        index: of the rank in it.

    Returns:
        Rows of `trace.ranks[index].events`, in the order of `matches.messages_of(index)`.
    """
    events = trace.ranks[index].events
    rows = np.flatnonzero(np.isin(events["kind"], (Kind.SEND, Kind.RECV)))
    return rows[np.argsort(events["begin_ns"][rows], kind="stable")]


def blocking_calls(rank: RankTrace) -> tuple[np.ndarray, np.ndarray]:
    """Return which events are calls that block, and which are the waits of these calls.

    The main thread waits in a call that blocks from its begin to its end: the trace has an event
    of the collective or message, and a wait with the same times.

    Returns:
        Two masks over `rank.events`.
    """
    events = rank.events
    calls, waits = (np.zeros(len(events), dtype=bool) for _ in range(2))
    wait_rows = np.flatnonzero(events["kind"] == Kind.WAIT)
    call_rows = np.flatnonzero(np.isin(events["kind"], COMMUNICATION_KINDS))
    if not len(wait_rows) or not len(call_rows):
        return calls, waits
    wait_rows = wait_rows[np.argsort(events["begin_ns"][wait_rows], kind="stable")]
    begins = events["begin_ns"][wait_rows]
    at = np.minimum(np.searchsorted(begins, events["begin_ns"][call_rows]), len(begins) - 1)
    owner = wait_rows[at]
    same = (events["begin_ns"][owner] == events["begin_ns"][call_rows]) & (
        events["end_ns"][owner] == events["end_ns"][call_rows]
    )
    calls[call_rows[same]] = True
    waits[owner[same]] = True
    return calls, waits
