"""A trace in numbers: what was recorded on each rank, on which clock, and what it adds up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import Breakdown
from paceline.core.record import Record
from paceline.trace.arrivals import encounters
from paceline.trace.communication import Traffic, communication
from paceline.trace.events import Kind
from paceline.trace.phases import phases

if TYPE_CHECKING:
    from paceline.trace.merge import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStats(Record):
    """One rank's trace.

    Attributes:
        rank: the global rank.
        events: how many of each kind.
        steps: that it completed.
        loop_wall_s: wall time of these steps.
        breakdown: the same by phase.
        clock_offset_ns: what was added to its first times to share rank 0's clock.
        clock_drift: what was added more for each nanosecond since.
        clock_error_ns: largest error of that; None if nothing bounds it.
        dropped_count: events that were not recorded or written.
        complete: whether the file was closed, rather than cut short.
    """

    rank: int
    events: dict[str, int]
    steps: int
    loop_wall_s: float
    breakdown: Breakdown
    clock_offset_ns: int
    clock_drift: float
    clock_error_ns: int | None
    dropped_count: int
    complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceStats(Record):
    """A run's traces.

    Attributes:
        world_size: ranks that the run had.
        ranks: those that left a trace.
        traffic: their collectives.
    """

    world_size: int
    ranks: tuple[RankStats, ...]
    traffic: tuple[Traffic, ...]


def summarize_trace(trace: Trace) -> TraceStats:
    """Return the trace in numbers."""
    met = encounters(trace)
    ranks = []
    for rank, clock, part in zip(trace.ranks, trace.clocks, phases(trace, met), strict=True):
        counts = np.bincount(rank.events["kind"], minlength=max(Kind) + 1)
        ranks.append(
            RankStats(
                rank=rank.rank,
                events={kind.name.lower(): int(counts[kind]) for kind in Kind if counts[kind]},
                steps=part.steps,
                loop_wall_s=part.loop_wall_s,
                breakdown=part.breakdown(),
                clock_offset_ns=clock.offset_ns,
                clock_drift=clock.drift,
                clock_error_ns=clock.error_ns,
                dropped_count=rank.status.dropped_count,
                complete=rank.complete,
            )
        )
    return TraceStats(
        world_size=trace.world_size, ranks=tuple(ranks), traffic=communication(trace, met)
    )
