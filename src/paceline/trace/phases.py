"""Turns a run's events into seconds by phase, for each rank and step.

A step runs from the end of one optimizer step to the end of the next. Events on the main lane are
nested; a phase's time is its own without what is nested in it, so that phases exclude each other
and with ``other`` add up to wall time. Time blocked in a collective becomes ``waiting`` until the
last rank that matters has come, and ``transfer`` from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES, Breakdown
from paceline.core.errors import CorruptTrace
from paceline.trace.arrivals import Blocked, Encounters, encounters
from paceline.trace.events import NOT_RUNNING, RUNNING, Kind, Lane

if TYPE_CHECKING:
    from paceline.trace.files import RankTrace
    from paceline.trace.merge import Trace

_PHASE_OF = {
    Kind.INPUT: PHASES.index("input"),
    Kind.COPY: PHASES.index("copy"),
    Kind.FORWARD: PHASES.index("forward"),
    Kind.BACKWARD: PHASES.index("backward"),
    Kind.OPTIMIZER: PHASES.index("optimizer"),
    Kind.CHECKPOINT: PHASES.index("checkpoint"),
}
_TRANSFER, _WAITING, _OTHER = (PHASES.index(one) for one in ("transfer", "waiting", "other"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankPhases:
    """Where one rank's time went.

    Attributes:
        rank: the global rank.
        seconds: by step and phase, shape (steps, phases), in the order of `PHASES`.
        step_s: wall time of each step, shape (steps,).
        running_s: time its threads ran, summed over them, shape (steps,).
        not_running_s: the same for time that they were runnable without a core. In the first step
            both are 0, since its counters hold all that was before the loop too.
        recorded: which steps were recorded, shape (steps,). Of others, that were lost because a
            buffer was full, only a share of the time between their neighbours is known.
    """

    rank: int
    seconds: np.ndarray
    step_s: np.ndarray
    running_s: np.ndarray
    not_running_s: np.ndarray
    recorded: np.ndarray

    @property
    def steps(self) -> int:
        """How many steps the rank completed."""
        return len(self.step_s)

    @property
    def loop_wall_s(self) -> float:
        """Seconds from the loop's first phase to the end of its last step."""
        return float(self.step_s.sum())

    def breakdown(self, first: int = 0, stop: int | None = None) -> Breakdown:
        """Return the seconds of steps `first` to `stop` - 1 together."""
        sums = self.seconds[first:stop].sum(axis=0)
        return Breakdown(**dict(zip(PHASES, map(float, sums), strict=True)))

    def median_breakdown(self, chosen: np.ndarray) -> Breakdown:
        """Return each phase's median over the steps that the mask `chosen` selects."""
        if not chosen.any():
            return Breakdown()
        middle = np.median(self.seconds[chosen], axis=0)
        return Breakdown(**dict(zip(PHASES, map(float, middle), strict=True)))


def phases(trace: Trace, met: Encounters | None = None) -> tuple[RankPhases, ...]:
    """Return each rank's seconds by step and phase, ranks in order.

    Args:
        trace: the run.
        met: from `encounters(trace)`, where it is known.

    Raises:
        CorruptTrace: a rank's steps are not numbered as a run numbers them.
    """
    met = met or encounters(trace)
    return tuple(
        _rank_phases(rank, waits) for rank, waits in zip(trace.ranks, met.blocked, strict=True)
    )


def step_time_s(ranks: tuple[RankPhases, ...]) -> float:
    """Return the median over steps of the slowest rank's step time; 0 without steps."""
    count = min((one.steps for one in ranks), default=0)
    if not count:
        return 0.0
    slowest = np.max([one.step_s[:count] for one in ranks], axis=0)
    recorded = np.all([one.recorded[:count] for one in ranks], axis=0)
    return float(np.median(slowest[recorded])) if recorded.any() else 0.0


def _rank_phases(rank: RankTrace, waits: tuple[Blocked, ...]) -> RankPhases:
    begins, ends, recorded = _step_bounds(rank)
    count = len(begins)
    seconds = np.zeros((count, len(PHASES)))
    step_s = (ends - begins) / 1e9
    first_ns = int(begins[0]) if count else 0
    for step, phase, amount_s in _segments(rank, first_ns, waits):
        if step < count:
            seconds[step, phase] += amount_s
    seconds[:, _OTHER] = np.maximum(0.0, step_s - seconds.sum(axis=1))
    return RankPhases(
        rank=rank.rank,
        seconds=seconds,
        step_s=step_s,
        running_s=_counter_s(rank, RUNNING, count),
        not_running_s=_counter_s(rank, NOT_RUNNING, count),
        recorded=recorded,
    )


def _step_bounds(rank: RankTrace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when each step began and ended, and which of these steps were recorded.

    A full buffer drops events, and with them steps. Those in a gap share the time between their
    neighbours equally, so that totals stay what they were; medians leave them out.

    Raises:
        CorruptTrace: more steps are missing than events were dropped, or numbers do not rise.
    """
    steps = rank.of(Kind.STEP)
    numbers = steps["step"].astype(np.int64)
    count = int(numbers.max()) + 1 if len(numbers) else 0
    missing = count - len(numbers)
    if (np.diff(numbers) <= 0).any() or missing > rank.status.dropped_count:
        raise CorruptTrace(
            "steps are not numbered in order",
            where=f"trace of rank {rank.rank}",
            why=f"{missing} of {count} are not there, {rank.status.dropped_count} events dropped",
            fix="Restore the file, or move it away to analyse the other ranks",
        )
    recorded = np.zeros(count, dtype=bool)
    recorded[numbers] = True
    begins, ends = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    begins[numbers], ends[numbers] = steps["begin_ns"], steps["end_ns"]
    if not missing:
        return begins, ends, recorded
    timed = rank.events[(rank.events["lane"] == Lane.MAIN) & _timed(rank.events["kind"])]
    before_ns = min(int(begins[numbers[0]]), int(timed["begin_ns"].min(initial=2**63)))
    after = -1
    for number in numbers.tolist():
        if number > after + 1:
            marks = np.linspace(before_ns, begins[number], number - after).astype(np.int64)
            begins[after + 1 : number], ends[after + 1 : number] = marks[:-1], marks[1:]
        before_ns, after = int(ends[number]), number
    return begins, ends, recorded


def _segments(
    rank: RankTrace, first_ns: int, waits: tuple[Blocked, ...]
) -> list[tuple[int, int, float]]:
    """Return (step, phase, seconds) of each main-lane event without what is nested in it."""
    wait_at = dict(zip(rank.of(Kind.WAIT)["begin_ns"].tolist(), waits, strict=True))
    events = rank.events[(rank.events["lane"] == Lane.MAIN) & _timed(rank.events["kind"])]
    events = events[events["begin_ns"] >= first_ns]
    events = events[np.lexsort((-events["end_ns"].astype(np.int64), events["begin_ns"]))]
    result = []
    stack: list[tuple[int, int]] = []  # (end, position in own)
    own: list[list[float]] = []  # [step, phase, nanoseconds]
    for begin, end, step, kind in zip(
        events["begin_ns"].tolist(),
        events["end_ns"].tolist(),
        events["step"].tolist(),
        events["kind"].tolist(),
        strict=True,
    ):
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if kind == Kind.WAIT:
            wait = wait_at[begin]
            waited = wait.ready_ns - wait.begin_ns
            moved = wait.end_ns - wait.ready_ns
            result.append((step, _WAITING, waited / 1e9))
            result.append((step, _TRANSFER, moved / 1e9))
            if stack:
                own[stack[-1][1]][2] -= waited + moved
            continue
        if stack:
            own[stack[-1][1]][2] -= end - begin
        stack.append((end, len(own)))
        own.append([step, _PHASE_OF[Kind(kind)], end - begin])
    result.extend((int(step), int(phase), max(0.0, ns) / 1e9) for step, phase, ns in own)
    return result


def _timed(kinds: np.ndarray) -> np.ndarray:
    return np.isin(kinds, [int(kind) for kind in _PHASE_OF] + [int(Kind.WAIT)])


def _counter_s(rank: RankTrace, name: str, count: int) -> np.ndarray:
    result = np.zeros(count)
    if name in rank.names:
        counters = rank.events[rank.events["kind"] == Kind.COUNTER]
        counters = counters[counters["name"] == rank.names.index(name)]
        counters = counters[(counters["step"] > 0) & (counters["step"] < count)]
        result[counters["step"]] = counters["amount"] / 1e9
    return result
