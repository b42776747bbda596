"""A rank's main thread as a sequence of phases, which answers how long each lasted until any time.

Events are nested; the timeline is flat: at each time the innermost event decides. A wait is cut
where the last rank on which it depends had entered: `waiting` before, `transfer` after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.trace.analysis.phases import PHASE_OF_KIND, parents_of
from paceline.trace.format.events import MAIN, Kind

if TYPE_CHECKING:
    from paceline.trace.analysis import Analysis
    from paceline.trace.efficiency.window import StepWindow

_WAITING, _TRANSFER, _OTHER = (PHASES.index(name) for name in ("waiting", "transfer", "other"))
_PASSES = ("forward", "backward")
IO_PHASES = [PHASES.index(name) for name in ("input", "checkpoint")]


@dataclass(frozen=True, slots=True, eq=False)
class PhaseTimeline:
    """The phases of one rank's main thread, on the run's clock.

    Attributes:
        times_ns: when a phase begins, in order, shape (points,).
        phases: the phase from each of these times on, an index of `PHASES`, shape (points,).
        until_ns: time in each phase before each of these times, shape (points, phases).
    """

    times_ns: np.ndarray
    phases: np.ndarray
    until_ns: np.ndarray

    def before_ns(self, times_ns: np.ndarray) -> np.ndarray:
        """Return the nanoseconds in each phase before each time, shape (times, phases).

        Time before the first event is in no phase, time after the last one is `other`.
        """
        if not len(self.times_ns):
            return np.zeros((len(times_ns), len(PHASES)), dtype=np.int64)
        at = np.searchsorted(self.times_ns, times_ns, side="right") - 1
        place = np.maximum(at, 0)
        found = self.until_ns[place].copy()
        since_ns = np.where(at >= 0, times_ns - self.times_ns[place], 0)
        found[np.arange(len(found)), self.phases[place]] += since_ns
        return found

    def at(self, times_ns: np.ndarray) -> np.ndarray:
        """Return the phase at each time, an index of `PHASES`, shape (times,)."""
        if not len(self.times_ns):
            return np.full(len(times_ns), _OTHER)
        at = np.searchsorted(self.times_ns, times_ns, side="right") - 1
        return np.where(at >= 0, self.phases[np.maximum(at, 0)], _OTHER)

    def between_ns(self, begins_ns: np.ndarray, ends_ns: np.ndarray) -> np.ndarray:
        """Return the nanoseconds in each phase of intervals, shape (intervals, phases)."""
        return np.asarray(self.before_ns(ends_ns) - self.before_ns(begins_ns))


def phase_timeline(
    window: Analysis | StepWindow, trace_index: int, *, with_waits: bool = True
) -> PhaseTimeline:
    """Return the phases of a rank's main thread.

    Args:
        window: steps of a run, or all of them.
        trace_index: the rank's index among those that left a trace.
        with_waits: without them, a wait belongs to the phase in which it is.

    Cost: 100 bytes for each event of the main thread, held while the timeline is.
    """
    spans, phases = _spans(window, trace_index, with_waits=with_waits)
    order = np.lexsort((-spans[:, 1], spans[:, 0]))
    spans, phases = spans[order], phases[order]
    events = np.zeros(len(spans), [("begin_ns", "<i8"), ("end_ns", "<i8")])
    events["begin_ns"], events["end_ns"] = spans[:, 0], spans[:, 1]
    parents = parents_of(events, np.zeros(len(spans), dtype=bool))
    after = np.where(parents >= 0, phases[np.maximum(parents, 0)], _OTHER)
    count = len(spans)
    times = np.concatenate([spans[:, 0], spans[:, 1]])
    # At one time ends come before begins, inner ends before outer ones, outer begins before inner.
    rows = np.arange(count)
    is_begin = np.repeat([1, 0], count)
    order = np.lexsort((np.concatenate([rows, -rows]), is_begin, times))
    times, active = times[order], np.concatenate([phases, after])[order]
    spent = np.zeros((len(times), len(PHASES)), dtype=np.int64)
    if len(times):
        spent[np.arange(1, len(times)), active[:-1]] = np.diff(times)
    return PhaseTimeline(times, active, np.cumsum(spent, axis=0))


def _spans(
    window: Analysis | StepWindow, trace_index: int, *, with_waits: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return begin and end of what is timed, shape (spans, 2), and its phases; none is empty."""
    rank, clock = window.trace.ranks[trace_index], window.trace.clocks[trace_index]
    waits = window.waits[trace_index][: None if with_waits else 0]
    kinds = rank.events["kind"]
    phase_of = np.where(kinds == Kind.STAGE, _stage_phases(rank.names)[rank.events["name"]],
                        PHASE_OF_KIND[kinds])  # fmt: skip
    chosen = (rank.events["location"] == MAIN) & (phase_of >= 0)
    events = rank.events[chosen]
    spans = np.concatenate(
        [
            np.stack([clock.to_run_ns(events["begin_ns"]), clock.to_run_ns(events["end_ns"])], 1),
            np.stack([waits["begin_ns"], waits["ready_ns"]], 1),
            np.stack([waits["ready_ns"], waits["end_ns"]], 1),
        ]
    )
    phases = np.concatenate(
        [
            phase_of[chosen],
            np.full(len(waits), _WAITING),
            np.full(len(waits), _TRANSFER),
        ]
    )
    lasting = spans[:, 1] > spans[:, 0]
    return spans[lasting], phases[lasting]


def _stage_phases(names: tuple[str, ...]) -> np.ndarray:
    """Return for each of a rank's names the phase of a pipeline's action of that name, -1 of none.

    An action is named ``forward``, ``backward``, or by the part of a backward pass that it is.
    """
    phases = [
        next((PHASES.index(phase) for phase in _PASSES if name.startswith(phase)), -1)
        for name in names
    ]
    return np.array(phases or [-1])
