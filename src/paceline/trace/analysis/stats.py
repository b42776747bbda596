"""Statistics of a trace: events, clock and time by phase of each rank, and the run's traffic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import Breakdown
from paceline.core.record import Record
from paceline.trace.analysis.communication import Traffic
from paceline.trace.analysis.files import FileUse
from paceline.trace.analysis.host import HostTime
from paceline.trace.analysis.loader import LoaderCeiling
from paceline.trace.analysis.nodes import NodeActivity
from paceline.trace.analysis.sampled import StepSamples
from paceline.trace.format.events import Kind
from paceline.trace.merge.matches import Mismatch
from paceline.trace.merge.timing import Violations

if TYPE_CHECKING:
    from paceline.trace.analysis.analyse import Analysis


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStats(Record):
    """One rank's trace.

    Attributes:
        rank: the global rank.
        events: number of events by kind.
        steps: number of steps that the rank completed.
        loop_wall_s: wall time of these steps, seconds.
        breakdown: the same wall time by phase.
        clock_offset_ns: offset that was added to the rank's first times to bring them onto the
            run's clock.
        clock_drift: nanoseconds that were added in addition per nanosecond since then.
        clock_error_ns: largest error of a corrected time; None if the error has no bound.
        dropped_count: number of events that were not recorded or written.
        complete: whether the file was closed, rather than truncated.
        host: the script's own work between phases by name, the longest first.
        clock_changes: how often the clock was set, or its drift changed, during the run; offset and
            drift are those before the first change.
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
    host: tuple[HostTime, ...] = ()
    clock_changes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceStats(Record):
    """A run's traces.

    Attributes:
        world_size: number of ranks of the run.
        ranks: statistics of each rank that left a trace.
        traffic: collectives and messages by operation, group and size.
        mismatch_count: number of collectives on whose operation or size ranks do not agree.
        mismatches: the first of these collectives.
        step_rule: what ends a step, by a value of `merge.steps.StepRule`.
        violations: what contradicted causality after the correction of clocks, and was repaired.
        files: what the run did with each file, the longest time first; empty if not recorded.
        loader: what limits the loader, and what that costs; None if no loader was seen.
        sampled: what some steps show: layers, operators, memory by what holds it.
        nodes: what each node did second by second.
    """

    world_size: int
    ranks: tuple[RankStats, ...]
    traffic: tuple[Traffic, ...]
    mismatch_count: int = 0
    mismatches: tuple[Mismatch, ...] = ()
    step_rule: str = ""
    violations: Violations = field(default_factory=Violations)
    files: tuple[FileUse, ...] = ()
    loader: LoaderCeiling | None = None
    sampled: StepSamples = field(default_factory=StepSamples)
    nodes: tuple[NodeActivity, ...] = ()


def summarize_trace(analysis: Analysis) -> TraceStats:
    """Return the statistics of the analysed trace."""
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
                host=phases.host,
                clock_changes=len(clock.later),
            )
        )
    return TraceStats(
        world_size=trace.world_size,
        ranks=tuple(ranks),
        traffic=analysis.traffic,
        mismatch_count=trace.matches.mismatch_count,
        mismatches=analysis.mismatches,
        step_rule=analysis.step_rule,
        violations=trace.violations,
        files=analysis.files,
        loader=analysis.loader,
        sampled=analysis.sampled,
        nodes=analysis.nodes,
    )
