"""Turns a run's events into seconds by phase, for each rank and step.

A step runs from the end of one optimizer step to the end of the next, or as the rule of
`merge.steps` has it. Events of the main thread are nested; the time of an event excludes the events
nested in it, so that phases exclude each other and add up to wall time together with ``other``.
Time blocked in a collective is ``waiting`` until the last rank on which this rank depends has
entered, and ``transfer`` (exposed communication) after that. Within an evaluation all but that is
``evaluation``. Time between phases is ``host`` where hooks or samples name it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES, Breakdown
from paceline.core.errors import CorruptTrace
from paceline.trace.analysis.counters import counter
from paceline.trace.analysis.host import HostTime, host_work
from paceline.trace.format.events import MAIN, NOT_RUNNING, RUNNING, Kind
from paceline.trace.merge.evaluation import evaluation_spans, in_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace

_PHASE_OF = {
    Kind.INPUT: PHASES.index("input"),
    Kind.COPY: PHASES.index("copy"),
    Kind.COMPILATION: PHASES.index("compilation"),
    Kind.FORWARD: PHASES.index("forward"),
    Kind.BACKWARD: PHASES.index("backward"),
    Kind.OPTIMIZER: PHASES.index("optimizer"),
    Kind.CHECKPOINT: PHASES.index("checkpoint"),
    Kind.EVALUATION: PHASES.index("evaluation"),
    Kind.HOST: PHASES.index("host"),
    Kind.READ: PHASES.index("input"),
    Kind.WRITE: PHASES.index("checkpoint"),
}
_TRANSFER, _WAITING, _OTHER = (PHASES.index(name) for name in ("transfer", "waiting", "other"))
_EVALUATION, _HOST = PHASES.index("evaluation"), PHASES.index("host")
PHASE_OF_KIND = np.full(max(Kind) + 1, -1)
for _kind, _phase in _PHASE_OF.items():
    PHASE_OF_KIND[_kind] = _phase
_EVALUATING = [Kind.INPUT, Kind.COPY, Kind.FORWARD, Kind.HOST, Kind.READ]
_IN_EVALUATION = np.isin(np.arange(max(Kind) + 1), _EVALUATING)
_TIMED = PHASE_OF_KIND >= 0
_TIMED[Kind.WAIT] = True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankPhases:
    """One rank's time by step and phase.

    Attributes:
        rank: the global rank.
        seconds: seconds by step and phase, shape (steps, phases), in the order of `PHASES`.
        step_s: wall time of each step, shape (steps,), seconds.
        running_s: time during which the rank's threads ran, summed over threads, shape (steps,),
            seconds; 0 in the first step, whose counters include the time before the loop.
        not_running_s: time during which the rank's threads were runnable without a core, summed and
            shaped as `running_s`; 0 in the first step, too.
        recorded: which steps were recorded, shape (steps,). Steps that are not recorded were lost
            because a buffer was full; the time between the recorded steps before and after them is
            shared among them equally.
        host: the named work between phases, the longest first.
    """

    rank: int
    seconds: np.ndarray
    step_s: np.ndarray
    running_s: np.ndarray
    not_running_s: np.ndarray
    recorded: np.ndarray
    host: tuple[HostTime, ...] = ()

    @property
    def steps(self) -> int:
        """Number of steps that the rank completed."""
        return len(self.step_s)

    @property
    def train_s(self) -> np.ndarray:
        """Wall time of each step without the evaluation in it, shape (steps,), seconds."""
        return np.asarray(self.step_s - self.seconds[:, _EVALUATION])

    @property
    def loop_wall_s(self) -> float:
        """Seconds from the loop's first phase to the end of its last step."""
        return float(self.step_s.sum())

    def breakdown(self, first: int = 0, stop: int | None = None) -> Breakdown:
        """Return the seconds by phase, summed over steps `first` to `stop` - 1."""
        sums = self.seconds[first:stop].sum(axis=0)
        return Breakdown(**dict(zip(PHASES, map(float, sums), strict=True)))


def rank_phases(ranks: Sequence[RankTrace], waits: Sequence[np.ndarray]) -> tuple[RankPhases, ...]:
    """Return each rank's seconds by step and phase, ranks in order.

    Args:
        ranks: traces of a run, ordered by rank.
        waits: one array of `WAIT_INTERVAL` per rank, from `wait_intervals`.

    Raises:
        CorruptTrace: a rank's step numbers do not increase, or more steps are missing than events
            were dropped.
    """
    return tuple(_of_rank(rank, own) for rank, own in zip(ranks, waits, strict=True))


def step_time_s(ranks: Sequence[RankPhases]) -> float:
    """Return the median over steps of the slowest rank's step time; 0 without steps.

    Evaluations are left out: one every few steps would make a typical step of it.
    """
    count = min((rank.steps for rank in ranks), default=0)
    if not count:
        return 0.0
    slowest = np.max([rank.train_s[:count] for rank in ranks], axis=0)
    recorded = np.all([rank.recorded[:count] for rank in ranks], axis=0)
    return float(np.median(slowest[recorded])) if recorded.any() else 0.0


def _of_rank(rank: RankTrace, waits: np.ndarray) -> RankPhases:
    begins, ends, recorded = _step_bounds(rank)
    count = len(begins)
    step_s = (ends - begins) / 1e9
    first_ns = int(begins[0]) if count else 0
    seconds = _own_ns(rank, first_ns, waits, count) / 1e9
    work = host_work(rank, begins, ends)
    rest_s = np.maximum(0.0, step_s - seconds.sum(axis=1))
    sampled_s = np.minimum(work.sampled_s, rest_s)
    seconds[:, _HOST] += sampled_s
    seconds[:, _OTHER] = rest_s - sampled_s
    return RankPhases(
        rank=rank.rank,
        seconds=seconds,
        step_s=step_s,
        running_s=counter(rank, RUNNING, count) / 1e9,
        not_running_s=counter(rank, NOT_RUNNING, count) / 1e9,
        recorded=recorded,
        host=work.times,
    )


def _step_bounds(rank: RankTrace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when each step began and ended, and which of these steps were recorded.

    A full buffer drops events, and with them steps. The steps of a gap share the time between the
    recorded steps before and after the gap equally, so that totals stay right; medians leave these
    steps out.

    Raises:
        CorruptTrace: more steps are missing than events were dropped, or numbers do not increase.
    """
    steps = rank.events_of(Kind.STEP)
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
    timed = rank.events[_on_main_thread(rank)]
    before_ns = min(int(begins[numbers[0]]), int(timed["begin_ns"].min(initial=2**63)))
    after = -1
    for number in numbers.tolist():
        if number > after + 1:
            marks = np.linspace(before_ns, begins[number], number - after).astype(np.int64)
            begins[after + 1 : number], ends[after + 1 : number] = marks[:-1], marks[1:]
        before_ns, after = int(ends[number]), number
    return begins, ends, recorded


def _own_ns(rank: RankTrace, first_ns: int, waits: np.ndarray, count: int) -> np.ndarray:
    """Return nanoseconds by step and phase; an event's time excludes the events nested in it.

    Args:
        rank: trace of the rank.
        first_ns: events that begin earlier are left out.
        waits: the rank's waits, an array of `WAIT_INTERVAL`.
        count: number of steps to return.
    """
    events = rank.events[_on_main_thread(rank)]
    events = events[events["begin_ns"] >= first_ns]
    events = events[np.lexsort((-events["end_ns"].astype(np.int64), events["begin_ns"]))]
    is_wait = events["kind"] == Kind.WAIT
    chosen = waits[rank.events_of(Kind.WAIT)["begin_ns"] >= first_ns]
    waiting = (chosen["ready_ns"] - chosen["begin_ns"]).astype(np.float64)
    moving = (chosen["end_ns"] - chosen["ready_ns"]).astype(np.float64)
    parents = parents_of(events, is_wait)
    nested_ns = (events["end_ns"] - events["begin_ns"]).astype(np.float64)
    nested_ns[is_wait] = waiting + moving
    own_ns = nested_ns - np.bincount(
        parents[parents >= 0], weights=nested_ns[parents >= 0], minlength=len(events)
    )
    result = np.zeros((count, len(PHASES)))
    steps, phases = events["step"].astype(np.int64), PHASE_OF_KIND[events["kind"]]
    evaluates = (
        in_spans(events["begin_ns"], evaluation_spans(rank)) & _IN_EVALUATION[events["kind"]]
    )
    phases = np.where(evaluates, _EVALUATION, phases)
    for which, phase, ns in (
        (~is_wait, phases[~is_wait], np.maximum(0.0, own_ns[~is_wait])),
        (is_wait, _WAITING, waiting),
        (is_wait, _TRANSFER, moving),
    ):
        place = steps[which] * len(PHASES) + phase
        within = steps[which] < count
        result += np.bincount(
            place[within], weights=ns[within], minlength=count * len(PHASES)
        ).reshape(count, len(PHASES))
    return result


def parents_of(events: np.ndarray, is_wait: np.ndarray) -> np.ndarray:
    """Return for each event the row of the event in which it is nested directly, or -1.

    The parent is the nearest earlier event, waits left out, that ends after this event begins. Rows
    that end too early are skipped together: all rows between a row and its own candidate end before
    that row begins, hence before all later rows begin. So each pass doubles the distance.

    Args:
        events: events of one location, ordered by begin time, longer events first.
        is_wait: which events are waits, in which no event is nested.
    """
    rows = np.arange(len(events))
    latest = np.maximum.accumulate(np.where(is_wait, -1, rows))
    candidates = np.concatenate([[-1], latest[:-1]]) if len(rows) else rows
    begins, ends = events["begin_ns"], events["end_ns"]
    pending = np.flatnonzero(candidates >= 0)
    while len(pending):
        over = ends[candidates[pending]] <= begins[pending]
        pending = pending[over]
        candidates[pending] = candidates[candidates[pending]]
        pending = pending[candidates[pending] >= 0]
    return candidates


def _on_main_thread(rank: RankTrace) -> np.ndarray:
    return np.asarray((rank.events["location"] == MAIN) & _TIMED[rank.events["kind"]])
