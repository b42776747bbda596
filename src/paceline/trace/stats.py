"""A trace in numbers: what was recorded on each rank, on which clock, and what it adds up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import Breakdown
from paceline.core.record import Record
from paceline.trace.communication import Traffic
from paceline.trace.events import Kind
from paceline.trace.matches import Mismatch

if TYPE_CHECKING:
    from paceline.trace.analysis import Analysis


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
        traffic: their collectives and messages.
        mismatch_count: collectives that ranks joined without agreeing on what they are.
        mismatches: the first of these.
    """

    world_size: int
    ranks: tuple[RankStats, ...]
    traffic: tuple[Traffic, ...]
    mismatch_count: int = 0
    mismatches: tuple[Mismatch, ...] = ()


def summarize_trace(analysis: Analysis) -> TraceStats:
    """Return the trace in numbers."""
    trace = analysis.trace
    ranks = []
    for rank, clock, phases in zip(trace.ranks, trace.clocks, analysis.phases, strict=True):
        counts = np.bincount(rank.events["kind"], minlength=max(Kind) + 1)
        ranks.append(
            RankStats(
                rank=rank.rank,
                events={kind.name.lower(): int(counts[kind]) for kind in Kind if counts[kind]},
                steps=phases.steps,
                loop_wall_s=phases.loop_wall_s,
                breakdown=phases.breakdown(),
                clock_offset_ns=clock.offset_ns,
                clock_drift=clock.drift,
                clock_error_ns=clock.error_ns,
                dropped_count=rank.status.dropped_count,
                complete=rank.complete,
            )
        )
    return TraceStats(
        world_size=trace.world_size,
        ranks=tuple(ranks),
        traffic=analysis.traffic,
        mismatch_count=trace.matches.mismatch_count,
        mismatches=analysis.mismatches,
    )
