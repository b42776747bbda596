"""Skew: by how much each rank entered its collectives later than it could have.

A *sync* of a rank is the end of its wait for a synchronising collective (all-reduce, all-gather,
reduce-scatter, all-to-all, barrier); a *sync interval* is the time between two syncs. One-way
operations (broadcast, reduce, gather, scatter, send, receive) do not synchronise all ranks.

A rank's *compute time since the last sync* at a collective is the time since the rank's last sync,
minus the time that the rank has spent waiting in one-way operations since then. The rank's skew is
that time minus the smallest such time among the ranks. The time of entry alone would accuse the
wrong rank: a broadcast makes its receivers as late as its root, and the receivers carry that delay
into the next all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.merge.matches import Matches


def skew_s(matches: Matches, waits: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """Return each rank's skew in each step, shape (ranks, steps), seconds.

    If ranks synchronise several times in a step, the skews add up, since all ranks start equal
    after each sync. Several collectives in one sync interval count once, by the largest skew. A
    step without a synchronising collective has skew 0.

    Args:
        matches: the run's matched collectives and messages.
        waits: one array of `WAIT_INTERVAL` per rank, from `wait_intervals`.
        steps: number of steps to return.
    """
    synchronising = matches.synchronising()
    compute_ns = np.zeros(len(matches.calls), dtype=np.int64)
    intervals = np.zeros(len(matches.calls), dtype=np.int64)
    # `trace_index`: of the ranks that left a trace, so not the global rank if one left none.
    for trace_index, own_waits in enumerate(waits):
        own = matches.calls_of(trace_index)
        entered = matches.calls["enter_ns"][own]
        compute_ns[own], intervals[own] = compute_since_sync_ns(entered, own_waits)
    counted = synchronising & (intervals > 0)
    rows = matches.by_instance[counted[matches.by_instance]]  # of `matches.calls`, by instance
    calls = matches.calls[rows]
    late_ns = compute_ns[rows] - _smallest(compute_ns[rows], calls["instance"])
    chosen = (late_ns > 0) & (calls["step"] < steps)
    trace_indices, steps_of_calls = calls["trace"][chosen], calls["step"][chosen]
    result = np.zeros((len(waits), steps))
    largest_ns, at = _largest(
        late_ns[chosen], trace_indices, steps_of_calls, intervals[rows][chosen]
    )
    np.add.at(result, (trace_indices[at], steps_of_calls[at]), largest_ns / 1e9)
    return result


def compute_since_sync_ns(
    entered_ns: np.ndarray, waits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's compute time since the last sync at each entry, and the sync interval.

    Sync intervals are numbered from 1. Interval 0 is the time before the first sync; it has no
    beginning, so its compute time has no meaning.

    Args:
        entered_ns: times at which the rank entered its collectives, in order, shape (calls,).
        waits: the rank's waits, an array of `WAIT_INTERVAL`.

    Returns:
        Compute times in nanoseconds and numbers of sync intervals, both of shape (calls,).
    """
    waits = waits[np.argsort(waits["begin_ns"], kind="stable")]
    ended_ns = np.maximum.accumulate(waits["end_ns"])
    over = np.searchsorted(ended_ns, entered_ns, side="right")  # waits that ended before each entry
    syncs = waits["synchronises"]
    numbers = np.arange(1, len(waits) + 1)  # of waits, from 1; 0 stands for no sync yet
    last_sync = np.concatenate([[0], np.maximum.accumulate(np.where(syncs, numbers, 0))])[over]
    intervals = np.concatenate([[0], np.cumsum(syncs)])[over]
    lengths = np.where(syncs, 0, waits["end_ns"] - waits["begin_ns"])
    waited = np.concatenate([[0], np.cumsum(lengths)])
    since_ns = np.concatenate([[0], waits["end_ns"]])[last_sync]
    return entered_ns - since_ns - (waited[over] - waited[last_sync]), intervals


def _smallest(values: np.ndarray, instances: np.ndarray) -> np.ndarray:
    """Return for each value the smallest of its instance; values are ordered by instance."""
    if not len(values):
        return values
    first = np.flatnonzero(np.concatenate([[True], instances[1:] != instances[:-1]]))
    counts = np.diff(np.concatenate([first, [len(values)]]))
    return np.repeat(np.minimum.reduceat(values, first), counts)


def _largest(
    late_ns: np.ndarray, trace_indices: np.ndarray, steps: np.ndarray, intervals: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest value of each rank, step and interval, and its index in `late_ns`."""
    order = np.lexsort((late_ns, intervals, steps, trace_indices))
    last = np.ones(len(order), dtype=bool)
    for column in (trace_indices, steps, intervals):
        ordered = column[order]
        last[:-1] &= ordered[1:] == ordered[:-1]
    last[:-1] = ~last[:-1]
    at = order[last]
    return late_ns[at], at
