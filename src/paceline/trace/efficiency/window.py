"""Some steps of a run, in memory: what all measures of this package are taken of.

A run is measured window by window, so that it need not fit into memory. A window knows the steps
beside it, as far as its own exchanges reach, but measures its own steps alone; what goes from one
window to the next is carried by `measure`. Wherever steps are cut, the figures are the same: an
exchange with another step counts from the begin or the end of the rank's own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.trace.analysis.waits import awaited_calls, waits_and_calls
from paceline.trace.format.events import Kind
from paceline.trace.merge import Trace

if TYPE_CHECKING:
    from paceline.trace.analysis import Analysis
    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge.matches import Matches
    from paceline.trace.merge.windows import SpooledRun

_Arrays = tuple[np.ndarray, ...]
_WINDOW_EVENTS = 1_500_000  # of all ranks: an event takes some 300 bytes while it is measured
_NEVER_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class StepWindow:
    """Steps `first_step` to `stop_step` - 1 of a run.

    Attributes:
        trace: the events of these steps at least, matched, on the run's clock.
        waits: one array of `WAIT_INTERVAL` per rank.
        awaited: one array of `AWAITED` per rank.
        first_step, stop_step: the steps.
        run_first, run_stop: all steps that are measured.
        steps: number of steps that all ranks completed; `stop_step` is at most one more, for what
            comes after them.
    """

    trace: Trace
    waits: tuple[np.ndarray, ...]
    awaited: tuple[np.ndarray, ...]
    first_step: int
    stop_step: int
    run_first: int
    run_stop: int
    steps: int

    @property
    def matches(self) -> Matches:
        """The matched collectives and messages."""
        return self.trace.matches

    def inside(self, steps: np.ndarray) -> np.ndarray:
        """Return a mask over numbers of steps: those of the window."""
        steps = np.minimum(steps.astype(np.int64), self.steps)
        return np.asarray((steps >= self.first_step) & (steps < self.stop_step))

    def bounds_ns(self, trace_index: int) -> tuple[int, int]:
        """Return when the rank began and ended the steps; the ends of time for those of the run."""
        marks = self.trace.ranks[trace_index].events_of(Kind.STEP)
        ends_ns = self.trace.clocks[trace_index].to_run_ns(marks["end_ns"])
        before, until = (
            ends_ns[marks["step"] < step] for step in (self.first_step, self.stop_step)
        )
        begin_ns = int(before.max()) if self.first_step and len(before) else -_NEVER_NS
        end_ns = int(until.max()) if self.stop_step <= self.steps and len(until) else _NEVER_NS
        return begin_ns, end_ns


class MeasuredRun(Protocol):
    """A run that can be measured: its ranks and steps, and windows of it."""

    @property
    def ranks(self) -> tuple[RankTrace, ...]:
        """The ranks' traces, perhaps without events."""

    @property
    def recorded(self) -> np.ndarray:
        """Which steps each rank recorded, shape (ranks, steps): steps that all completed."""

    def windows(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return windows that cover the steps, each as its first step and its stop."""

    def read(self, first: int, stop: int) -> tuple[Trace, _Arrays, _Arrays]:
        """Return events, waits and what they were for: of a window's steps and those beside."""


class AnalysedRun:
    """A run whose analysis is in memory: one window."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._awaited = awaited_calls(analysis.trace)
        self.ranks = analysis.trace.ranks
        steps = analysis.steps
        self.recorded = np.array([rank.recorded[:steps] for rank in analysis.phases], dtype=bool)
        self.recorded = self.recorded.reshape(len(self.ranks), steps)

    def windows(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return one window."""
        return [(first, stop)] if first < stop else []

    def read(self, first: int, stop: int) -> tuple[Trace, _Arrays, _Arrays]:
        """Return all events and waits."""
        del first, stop  # all steps are there
        return self._analysis.trace, self._analysis.waits, self._awaited


class StreamedRun:
    """A run whose events are on disk: windows of as many steps as memory is meant to hold."""

    def __init__(self, spooled: SpooledRun, window_events: int = _WINDOW_EVENTS) -> None:
        self._spooled = spooled
        self._window_events = window_events
        self.ranks = spooled.ranks
        self.recorded = spooled.recorded

    def windows(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return windows of at most so many events, but of some steps at least."""
        return self._spooled.windows(first, stop, self._window_events)

    def read(self, first: int, stop: int) -> tuple[Trace, _Arrays, _Arrays]:
        """Return the events and waits of a window's steps, and of some beside them."""
        trace = self._spooled.read(first, stop)
        return trace, *waits_and_calls(trace)
