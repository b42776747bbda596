"""Measures the efficiency of a run: all of this package's results, from one dependency graph.

The graph is made window by window, so that a run need not fit into memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import NotFound, UsageError
from paceline.core.record import Record
from paceline.trace.efficiency.graph import DependencyGraph, dependency_graph
from paceline.trace.efficiency.matrix import CommunicationMatrix, MatrixSum
from paceline.trace.efficiency.metrics import EfficiencyMetrics, efficiency_metrics
from paceline.trace.efficiency.overlap import OverlapSum, RankOverlap
from paceline.trace.efficiency.path import CriticalPath, PathWalk
from paceline.trace.efficiency.replay import Lengths, Levels, order_levels, replay_ns
from paceline.trace.efficiency.wait_states import WaitStates, WaitSum
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
from paceline.trace.efficiency.window import AnalysedRun, StepWindow, StreamedRun
from paceline.trace.format.events import Kind
from paceline.trace.merge.windows import SpooledRun

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.trace.analysis import Analysis
    from paceline.trace.efficiency.window import MeasuredRun

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
    """Return the efficiency of an analysed run, or of one step of it.

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
    return _measured(AnalysedRun(analysis), step)


def measure_run(run: Path, step: int | None = None) -> RunEfficiency:
    """Return the efficiency of the run in a folder, or of one step of it.

    The result is that of `measure_efficiency`, in memory that does not grow with the run's length.

    Args:
        run: its folder.
        step: as of `measure_efficiency`.

    Raises:
        NotFound: there are no traces, no step that all ranks completed, or a rank lost all of them.
        UsageError: `step` is none of them.
        CorruptTrace: a trace is damaged.
        StorageError: a trace cannot be read, or there is no space for temporary files.
    Cost: reads each trace two to four times, and its events twice from a temporary file of 48
        bytes an event.
    """
    with SpooledRun(run) as spooled:
        return _measured(StreamedRun(spooled), step)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A window with what is made of it.

    Attributes:
        io_ns: time of each edge in input and checkpoints, shape (edges,).
        lengths: of each scenario.
        times_ns: when each node happens in each scenario, shape (scenarios, nodes).
    """

    window: StepWindow
    graph: DependencyGraph
    levels: Levels
    io_ns: np.ndarray
    lengths: list[Lengths]
    times_ns: np.ndarray


def _measured(run: MeasuredRun, step: int | None) -> RunEfficiency:
    """Return the efficiency of a run, from its windows: forwards, then backwards.

    Forwards each window is replayed from where the one before ended. Backwards the critical path is
    followed, and each wait is charged to what happened before it. Only the last window is not read
    twice.
    """
    steps = run.recorded.shape[1]
    first, stop = _steps(steps, step)
    _check_recorded(run, first, stop)
    opened = functools.partial(_opened, run, run_first=first, run_stop=stop)
    windows = run.windows(first, stop)
    totals = _Totals(len(run.ranks))
    part: _Part | None = None
    for window in windows:
        part = None  # before the next one is read
        part = totals.replayed(opened(*window))
    assert part is not None  # there is a step
    ranks = np.array([rank.rank for rank in run.ranks])
    path, waits = PathWalk(ranks), WaitSum(ranks)
    overlap, matrix = OverlapSum(ranks), MatrixSum(run.ranks)
    for number in reversed(range(len(windows))):
        if part is None:
            part = _part(opened(*windows[number]), totals.begins_ns[number], totals.origin_ns)
        path.add(part.window, part.graph, part.levels, part.lengths[0], part.times_ns[0])
        waits.add(part.window, part.graph, part.levels)
        overlap.add(part.window)
        matrix.add(part.window)
        part = None
    for outside in (*run.windows(0, first), *run.windows(stop, steps + 1)):
        beside = opened(*outside)
        overlap.add(beside)
        matrix.add(beside)
    return RunEfficiency(
        first_step=first,
        last_step=stop - 1,
        seconds=totals.wall_ns / 1e9,
        metrics=totals.metrics(),
        what_ifs=totals.what_ifs(stop - first),
        path=path.result(),
        waits=waits.result(),
        overlap=overlap.result(),
        matrix=matrix.result(),
        replay_error=-_shorter(totals.ends_ns[0], totals.wall_ns),
        cut_count=totals.cut_count,
    )


def _opened(
    run: MeasuredRun, first: int, stop: int, *, run_first: int, run_stop: int
) -> StepWindow:
    trace, waits, awaited = run.read(first, stop)
    steps = run.recorded.shape[1]
    return StepWindow(trace, waits, awaited, first, stop, run_first, run_stop, steps)


def _part(window: StepWindow, begins_ns: np.ndarray | None, origin_ns: int) -> _Part:
    """Return what is made of a window.

    Args:
        window: the steps.
        begins_ns: when ranks begin them in each scenario; None: when they did.
        origin_ns: times are counted from this one.
    """
    graph = dependency_graph(window)
    if begins_ns is None:
        recorded_ns = graph.recorded_ns[graph.begins[:-1]] - origin_ns
        begins_ns = np.repeat(recorded_ns[None].astype(np.float64), len(SCENARIOS), axis=0)
    levels = order_levels(graph)
    io_ns = edge_io_ns(window, graph)
    lengths = scenario_lengths(graph, io_ns)
    times_ns = replay_ns(graph, levels, lengths, begins_ns, origin_ns)
    return _Part(window, graph, levels, io_ns, lengths, times_ns)


class _Totals:
    """What windows add up to as they are replayed, and where each began.

    Attributes:
        origin_ns: when the first rank began; other times are counted from it.
        begins_ns: when ranks begin each window, of each window an array of shape (scenarios,
            traces).
        wall_ns: when the last rank ended, as recorded.
        ends_ns: the same in each scenario, shape (scenarios,).
        cut_count: dependencies that were left out.
    """

    def __init__(self, traces: int) -> None:
        self.origin_ns = 0
        self.begins_ns: list[np.ndarray] = []
        self.wall_ns = 0
        self.ends_ns = np.zeros(len(SCENARIOS))
        self.cut_count = 0
        self._last_begin_ns = 0
        self._outside_ns, self._io_ns = np.zeros((2, traces))
        self._next_ns: np.ndarray | None = None

    def replayed(self, window: StepWindow) -> _Part:
        """Return a window, the one after those before, and add its figures."""
        if self._next_ns is None:
            begins_ns = [_begin_ns(window, i) for i in range(len(window.trace.ranks))]
            self.origin_ns = min(begins_ns)
            self._last_begin_ns = max(begins_ns) - self.origin_ns
        part = _part(window, self._next_ns, self.origin_ns)
        graph = part.graph
        self.begins_ns.append(part.times_ns[:, graph.begins[:-1]])
        self._next_ns = part.times_ns[:, graph.ends]
        self.ends_ns = self._next_ns.max(axis=1)
        self.wall_ns = int(graph.recorded_ns[graph.ends].max()) - self.origin_ns
        self.cut_count += part.levels.cut_count
        self._outside_ns += outside_ns(graph)
        self._io_ns += rank_io_ns(graph, part.io_ns)
        return part

    def metrics(self) -> EfficiencyMetrics:
        """Return the factors of efficiency."""
        ideal_s = float(self.ends_ns[SCENARIOS.index(FREE_COMMUNICATION)]) / 1e9
        wall_s = self.wall_ns / 1e9
        return efficiency_metrics(self._outside_ns / 1e9, self._io_ns / 1e9, ideal_s, wall_s)

    def what_ifs(self, steps: int) -> tuple[ScenarioTime, ...]:
        """Return what a step takes in each scenario.

        A step lasts from the last rank's end of one to that of the next.
        """
        steps_s = ((self.ends_ns - self._last_begin_ns) / 1e9).tolist()
        return tuple(
            ScenarioTime(
                scenario=name,
                step_s=spent_s / steps,
                shorter=_shorter(spent_s, steps_s[SCENARIOS.index(RECORDED)]),
            )
            for name, spent_s in zip(SCENARIOS, steps_s, strict=True)
        )


def _begin_ns(window: StepWindow, trace_index: int) -> int:
    marks = window.trace.ranks[trace_index].events_of(Kind.STEP)
    own = marks[window.inside(marks["step"])]
    return window.trace.clocks[trace_index].to_run_ns(int(own["begin_ns"].min()))


def _steps(steps: int, step: int | None) -> tuple[int, int]:
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


def _check_recorded(run: MeasuredRun, first: int, stop: int) -> None:
    """Check that each rank recorded one of the steps `first` to `stop` - 1."""
    for rank, recorded in zip(run.ranks, run.recorded, strict=True):
        if not recorded[first:stop].any():
            steps = f"step {first}" if stop == first + 1 else f"steps {first} to {stop - 1}"
            raise NotFound(
                f"{steps} of rank {rank.rank} was not recorded",
                where="the run's traces",
                why="its buffer was full, and events were dropped",
                fix="Give another step, or none",
            )


def _shorter(seconds: float, whole_s: float) -> float:
    return 1 - seconds / whole_s if whole_s > 0 else 0.0
