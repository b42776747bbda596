"""Measures the efficiency of a run: all of this package's results, from one dependency graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import NotFound, UsageError
from paceline.core.record import Record
from paceline.trace.efficiency.graph import dependency_graph
from paceline.trace.efficiency.matrix import CommunicationMatrix, communication_matrix
from paceline.trace.efficiency.metrics import EfficiencyMetrics, efficiency_metrics
from paceline.trace.efficiency.overlap import RankOverlap, communication_overlap
from paceline.trace.efficiency.path import CriticalPath, critical_path
from paceline.trace.efficiency.replay import order_levels, replay_ns
from paceline.trace.efficiency.wait_states import WaitStates, wait_states
from paceline.trace.efficiency.what_if import (
    FREE_COMMUNICATION,
    RECORDED,
    SCENARIOS,
    ScenarioTime,
    edge_io_ns,
    outside_ns,
    rank_io_ns,
    scenario_lengths,
)

if TYPE_CHECKING:
    from paceline.trace.analysis import Analysis

_LEAST_STEPS = 3  # from which on the first step, which compiles and starts up, is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEfficiency(Record):
    """How well a run used its ranks, what it waited for, and what would make its steps shorter.

    Attributes:
        first_step: of the steps that metrics, waits, path and scenarios are of.
        last_step: the last of them.
        seconds: from the first rank's begin of these steps to the last rank's end.
        metrics: the factors of efficiency.
        what_ifs: what a step would take in scenarios; recorded first.
        path: the critical path of these steps.
        waits: the wait states, and who caused them.
        overlap: communication hidden behind computing, of each rank, over the whole run.
        matrix: bytes and messages by pair of ranks, over the whole run.
        replay_error: the replayed time of these steps over the recorded one, minus 1. Scenarios
            are no better than this.
        cut_count: dependencies that contradict each other, because of clocks or lost events, and
            are left out.
    """

    first_step: int
    last_step: int
    seconds: float
    metrics: EfficiencyMetrics
    what_ifs: tuple[ScenarioTime, ...]
    path: CriticalPath
    waits: WaitStates
    overlap: tuple[RankOverlap, ...]
    matrix: CommunicationMatrix
    replay_error: float
    cut_count: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.last_step - self.first_step + 1


def measure_efficiency(analysis: Analysis, step: int | None = None) -> RunEfficiency:
    """Return the efficiency of a run, or of one step of it.

    Args:
        analysis: of the run.
        step: the step; None: all that every rank completed, without the first if there are 3 or
            more.

    Raises:
        NotFound: there is no step that all ranks completed, or a rank lost all of these steps.
        UsageError: `step` is none of them.
    Cost: a few operations on arrays for each collective, and memory of about 300 bytes for each
        wait of a rank.
    """
    first, stop = _window(analysis, step)
    _check_recorded(analysis, first, stop)
    graph = dependency_graph(analysis, first, stop)
    levels = order_levels(graph)
    io_ns = edge_io_ns(analysis, graph)
    lengths = scenario_lengths(graph, io_ns)
    times_ns = replay_ns(graph, levels, lengths)
    ends_s = times_ns[:, graph.ends].max(axis=1) / 1e9
    seconds, steps = graph.wall_ns / 1e9, stop - first
    by_name = dict(zip(SCENARIOS, ends_s.tolist(), strict=True))
    replayed_s = by_name[RECORDED]
    # A step lasts from the last rank's end of one to that of the next.
    begun_s = graph.last_begin_ns / 1e9
    steps_s = {name: ended_s - begun_s for name, ended_s in by_name.items()}
    outside_s = outside_ns(graph) / 1e9
    return RunEfficiency(
        first_step=first,
        last_step=stop - 1,
        seconds=seconds,
        metrics=efficiency_metrics(
            outside_s, rank_io_ns(graph, io_ns) / 1e9, by_name[FREE_COMMUNICATION], seconds
        ),
        what_ifs=tuple(
            ScenarioTime(
                scenario=name,
                step_s=spent_s / steps,
                shorter=_shorter(spent_s, steps_s[RECORDED]),
            )
            for name, spent_s in steps_s.items()
        ),
        path=critical_path(analysis, graph, levels, lengths[0], times_ns[0]),
        waits=wait_states(analysis, graph, levels),
        overlap=communication_overlap(analysis),
        matrix=communication_matrix(analysis),
        replay_error=-_shorter(replayed_s, seconds),
        cut_count=levels.cut_count,
    )


def _window(analysis: Analysis, step: int | None) -> tuple[int, int]:
    steps = analysis.steps
    if not steps:
        raise NotFound(
            "no step that all ranks completed",
            where="the run's traces",
            fix="Record a run whose ranks complete some steps; paceline report RUN shows what is",
        )
    if step is None:
        return (1 if steps >= _LEAST_STEPS else 0), steps
    if not 0 <= step < steps:
        raise UsageError(
            f"there is no step {step}",
            where="the run's traces",
            why=f"all ranks completed {steps}",
            fix=f"Give a step from 0 to {steps - 1}",
        )
    return step, step + 1


def _check_recorded(analysis: Analysis, first: int, stop: int) -> None:
    """Check that each rank recorded one of the steps `first` to `stop` - 1."""
    for rank in analysis.phases:
        if not rank.recorded[first:stop].any():
            steps = f"step {first}" if stop == first + 1 else f"steps {first} to {stop - 1}"
            raise NotFound(
                f"{steps} of rank {rank.rank} was not recorded",
                where="the run's traces",
                why="its buffer was full, and events were dropped",
                fix="Give another step, or none",
            )


def _shorter(seconds: float, whole_s: float) -> float:
    return 1 - seconds / whole_s if whole_s > 0 else 0.0
