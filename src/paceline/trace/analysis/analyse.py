"""Computes from a merged trace when ranks waited, where time went, and which rank was late.

`analyse` makes the `Analysis` once; launch, report and stats read it. Every stage works on arrays
over all events of a rank or of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.analysis.blame import BlameRules, Straggler, find_stragglers
from paceline.trace.analysis.communication import Traffic, traffic
from paceline.trace.analysis.counters import StepCounters, step_counters
from paceline.trace.analysis.files import FileUse, file_uses
from paceline.trace.analysis.loader import LoaderCeiling, loader_ceiling
from paceline.trace.analysis.nans import NanValue, first_nan
from paceline.trace.analysis.nodes import NodeActivity, node_activities
from paceline.trace.analysis.phases import RankPhases, rank_phases, step_time_s
from paceline.trace.analysis.pipeline import PipelineUse, pipeline_use
from paceline.trace.analysis.sampled import StepSamples, step_samples
from paceline.trace.analysis.shifts import Shift, find_shifts
from paceline.trace.analysis.skew import skew_s
from paceline.trace.analysis.waits import wait_intervals
from paceline.trace.merge import Trace
from paceline.trace.merge.matches import Mismatch

if TYPE_CHECKING:
    from paceline.trace.merge.matches import Matches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Analysis:
    """The results of analysing a run's trace.

    Attributes:
        trace: the merged trace.
        waits: one array of `WAIT_INTERVAL` per rank, ordered by begin time.
        phases: seconds by step and phase, one record for each rank that left a trace.
        counters: of each rank's main thread, by step that all ranks completed: time on a core, time
            runnable without one, garbage collection, stops.
        skew_s: skew of each rank in each step that all ranks completed, shape (ranks, steps),
            seconds.
        stragglers: the ranks that were late, the costliest first.
        shifts: changes of all ranks within the run, in order of steps.
        traffic: collectives and messages by operation, group and size, the costliest first.
        mismatches: up to 20 collectives on whose operation or size the ranks do not agree; all such
            collectives are left out of waits, skew and traffic.
        nan: the first value that was not a number when the script read it; None if there was none.
        files: what the run did with each file, the longest time first; empty if its calls for files
            were not recorded.
        pipeline: how the ranks of a model in stages spent their batches; None without stages.
        loader: what limits the loader, and what that costs; None if no loader was seen.
        sampled: what some steps show: layers, operators, memory by what holds it.
        nodes: what each node did second by second, in order of its first rank.
    """

    trace: Trace
    waits: tuple[np.ndarray, ...]
    phases: tuple[RankPhases, ...]
    counters: tuple[StepCounters, ...]
    skew_s: np.ndarray
    stragglers: tuple[Straggler, ...]
    shifts: tuple[Shift, ...]
    traffic: tuple[Traffic, ...]
    mismatches: tuple[Mismatch, ...]
    nan: NanValue | None = None
    files: tuple[FileUse, ...] = ()
    pipeline: PipelineUse | None = None
    loader: LoaderCeiling | None = None
    sampled: StepSamples = field(default_factory=StepSamples)
    nodes: tuple[NodeActivity, ...] = ()

    @property
    def matches(self) -> Matches:
        """The matched collectives and messages of the run."""
        return self.trace.matches

    @property
    def steps(self) -> int:
        """Number of steps that every rank completed."""
        return int(self.skew_s.shape[1])

    @property
    def step_rule(self) -> str:
        """What ends a step of the training loop, by a value of `merge.steps.StepRule`."""
        return self.trace.step_rule

    @property
    def step_time_s(self) -> float:
        """Median over steps of the slowest rank's step time."""
        return step_time_s(self.phases)

    @property
    def untimed_count(self) -> int:
        """Number of collectives and messages whose completion was not seen (transfer unknown)."""
        return sum(line.untimed_count for line in self.traffic)


def analyse(trace: Trace, rules: BlameRules | None = None) -> Analysis:
    """Return the analysis of a trace.

    Args:
        trace: the merged trace of a run, from `load_run` or `merge`.
        rules: thresholds from which a rank counts as a straggler.

    Raises:
        CorruptTrace: a rank's step numbers do not increase, or more steps are missing than events
            were dropped.
    """
    waits = wait_intervals(trace)
    phases = rank_phases(trace.ranks, waits)
    steps = min((rank.steps for rank in phases), default=0)
    skew = skew_s(trace.matches, waits, steps)
    counters = tuple(
        step_counters(rank, own, steps) for rank, own in zip(trace.ranks, waits, strict=True)
    )
    return Analysis(
        trace=trace,
        waits=waits,
        phases=phases,
        counters=counters,
        skew_s=skew,
        stragglers=find_stragglers(phases, counters, skew, rules),
        shifts=find_shifts(phases),
        traffic=traffic(trace.matches),
        mismatches=trace.matches.mismatches(),
        nan=first_nan(trace.ranks),
        files=file_uses(trace.ranks),
        pipeline=pipeline_use(trace, waits, phases),
        loader=loader_ceiling(trace.ranks, phases, steps),
        sampled=step_samples(trace.ranks),
        nodes=node_activities(trace),
    )
