"""What the main thread of a rank did in each step: ran, waited for a core, or was halted.

Wall time of a thread is time on a core, time runnable without a core, and time asleep; the kernel
counts the first two. The recorder reads them at the end of each step. A main thread that waits in
MPI may spin, so that there it is read around calls, and what is counted is the time outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import (
    GARBAGE_COLLECTION,
    MAIN,
    MAIN_NOT_RUNNING,
    MAIN_RUNNING,
    MAJOR_FAULTS,
    PROGRAM_NOT_RUNNING,
    PROGRAM_RUNNING,
    STOPPED,
    TRAINED_BYTES,
    Kind,
)

if TYPE_CHECKING:
    from paceline.trace.format.files import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepCounters:
    """What the kernel and the interpreter say of a rank's main thread, by step.

    Attributes:
        running_s: time on a core, of an MPI program outside of MPI, shape (steps,), seconds; 0 in
            the first step, whose counters include the time before the loop.
        not_running_s: time runnable without a core outside waits, shaped and 0 as `running_s`.
        gc_s: time in which Python's garbage collector ran, shape (steps,), seconds.
        stop_count: how often the process was stopped and continued, shape (steps,).
        major_faults: page faults for which it waited for storage, shape (steps,).
        known: whether the trace holds the main thread's counters; traces of earlier versions hold
            only those of the whole process.
        trained_bytes: of the parameters that the rank's optimizers step; 0 if the trace does not
            say.
    """

    running_s: np.ndarray
    not_running_s: np.ndarray
    gc_s: np.ndarray
    stop_count: np.ndarray
    major_faults: np.ndarray
    known: bool
    trained_bytes: int


def step_counters(rank: RankTrace, waits: np.ndarray, steps: int) -> StepCounters:
    """Return the counters of a rank's first `steps` steps.

    Args:
        rank: trace of the rank.
        waits: the rank's waits, an array of `WAIT_INTERVAL`.
        steps: number of steps to return.
    """
    if PROGRAM_RUNNING in rank.names:  # without what the thread did in waits
        running_s = counter(rank, PROGRAM_RUNNING, steps) / 1e9
        not_running_ns = counter(rank, PROGRAM_NOT_RUNNING, steps)
    else:
        running_s = counter(rank, MAIN_RUNNING, steps) / 1e9
        not_running_ns = counter(rank, MAIN_NOT_RUNNING, steps) - _in_waits_ns(rank, waits, steps)
    return StepCounters(
        running_s=running_s,
        not_running_s=np.maximum(0.0, not_running_ns) / 1e9,
        gc_s=_garbage_collection_s(rank, steps),
        stop_count=counter(rank, STOPPED, steps).astype(np.int64),
        major_faults=counter(rank, MAJOR_FAULTS, steps),
        known=bool(running_s.any()),
        trained_bytes=trained_bytes(rank),
    )


def counter(rank: RankTrace, name: str, steps: int) -> np.ndarray:
    """Return the sum of a counter in each step, shape (steps,); 0 in the first step."""
    return _sum_by_step(rank, Kind.COUNTER, name, steps)


def trained_bytes(rank: RankTrace) -> int:
    """Return the bytes of the parameters that a rank's optimizers step; 0 if it does not say."""
    if TRAINED_BYTES not in rank.names:
        return 0
    counters = rank.events[rank.events["kind"] == Kind.COUNTER]
    values = counters[counters["name"] == rank.names.index(TRAINED_BYTES)]["amount"]
    return int(values.max(initial=0))


def _in_waits_ns(rank: RankTrace, waits: np.ndarray, steps: int) -> np.ndarray:
    """Return the time without a core that delayed nobody, since the rank waited then; (steps,).

    A drain may end before its event does: a thread that gets no core then is late. Traces of
    earlier versions do not say what was in waits, so that all of the time counts.
    """
    events = rank.events_of(Kind.WAIT)
    lasted_ns = (events["end_ns"] - events["begin_ns"]).astype(np.int64)
    later_ns = lasted_ns - (waits["end_ns"] - waits["begin_ns"])
    in_wait_ns = np.maximum(0, events["amount"].astype(np.int64) - np.maximum(0, later_ns))
    within = (events["step"] > 0) & (events["step"] < steps)
    return np.bincount(events["step"][within], weights=in_wait_ns[within], minlength=steps)


def _garbage_collection_s(rank: RankTrace, steps: int) -> np.ndarray:
    return _sum_by_step(rank, Kind.HOST, GARBAGE_COLLECTION, steps) / 1e9


def _sum_by_step(rank: RankTrace, kind: Kind, name: str, steps: int) -> np.ndarray:
    if name not in rank.names:
        return np.zeros(steps)
    events = rank.events[rank.events["name"] == rank.names.index(name)]
    chosen = (events["kind"] == kind) & (events["location"] == MAIN)
    chosen &= (events["step"] > 0) & (events["step"] < steps)
    events = events[chosen]
    amounts = events["amount"] if kind is Kind.COUNTER else events["end_ns"] - events["begin_ns"]
    return np.bincount(events["step"], weights=amounts.astype(np.float64), minlength=steps)
