"""A run whose events do not fit into memory, as windows of a few steps.

Each rank's events are read one rank at a time, get their steps (`prepare`), and go to a temporary
file, ordered by step. A window is then read from there for all ranks, matched by itself, and
forgotten::

    rank 0   | step 0 | step 1 | step 2 | step 3 | step 4 | ...
    rank 1   | step 0 | step 1 | step 2 | step 3 | step 4 | ...
                               '-- a window ----'
                  '------------ what is read of it ------------'

Steps beside a window are read with it, since exchanges may begin in one step and end in the next.
A collective or message of which ranks take part in steps further apart than that is not matched.
"""

from __future__ import annotations

import dataclasses
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np

from paceline.core.errors import storage_errors
from paceline.trace.format.events import EVENT_DTYPE, Kind
from paceline.trace.format.files import RankTrace, read_status, read_trace
from paceline.trace.merge.clock_bounds import ClockBounds, span_of_events
from paceline.trace.merge.load import Trace, check_one_run, on_one_clock, trace_paths
from paceline.trace.merge.matching import match
from paceline.trace.merge.prepare import prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# Steps that are read before a window and after it. What happened in a step is known if its
# exchanges with the steps before and after it are; and who caused a wait is looked for up to the
# step before last.
BEFORE, AFTER = 3, 1
_IN_MEMORY_BYTES = 64 << 20  # up to this the temporary file needs no disk


class SpooledRun:
    """The prepared events of a run in a temporary file; used as a context, which removes it.

    Attributes:
        ranks: each rank's trace without its events.
        clocks: the clock correction of each of them.
        recorded: which steps each rank recorded, shape (ranks, steps); of steps that all completed.
        event_counts: number of events by step, of all ranks together, shape (steps + 1,); the last
            is of what comes after these steps.
    """

    def __init__(self, run: Path) -> None:
        """Read, prepare and spool the traces of the run in folder `run`.

        Raises:
            NotFound: there is no run, or it holds no traces.
            CorruptTrace: a trace is damaged, or they are not of one run.
            StorageError: a trace cannot be read, or the temporary file cannot be written.
        """
        # Held until `__exit__`, so not opened as a context here.
        self._spool = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        paths = trace_paths(run)
        check_one_run([read_status(path) for path in paths])
        paths.sort(key=lambda path: read_status(path).rank)
        ranks: list[RankTrace] = []
        spans: list[tuple[int, int] | None] = []
        recorded: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        fix = "Free some space for temporary files, or name another folder in TMPDIR"
        with storage_errors(
            "cannot keep the events of a run", where=tempfile.gettempdir(), fix=fix
        ):
            for rank in prepared([partial(read_trace, path) for path in paths]):
                events = rank.events[np.argsort(rank.events["step"], kind="stable")]
                spans.append(span_of_events(events))
                steps = events["step"][events["kind"] == Kind.STEP].astype(np.int64)
                count = int(steps.max(initial=-1)) + 1
                known = np.zeros(count, dtype=bool)
                known[steps] = True
                recorded.append(known)
                places = np.searchsorted(events["step"], np.arange(count + 2), side="left")
                places[-1] = len(events)
                starts.append(places + self._spool.tell() // EVENT_DTYPE.itemsize)
                self._spool.write(events.tobytes())
                ranks.append(dataclasses.replace(rank, events=events[:0].copy()))
        steps_of_all = min(len(known) for known in recorded)
        self.ranks = tuple(ranks)
        self.recorded = np.array([known[:steps_of_all] for known in recorded])
        # Row of the first event of each step, and of the end: what follows the last step of all
        # ranks is one more step.
        self._starts = np.array(
            [np.concatenate([own[: steps_of_all + 1], own[-1:]]) for own in starts]
        )
        self.event_counts = np.diff(self._starts, axis=1).sum(axis=0)
        bounds = ClockBounds(self.ranks)
        if bounds.needed:
            for first, stop in self.windows(0, self.steps + 1, 1 << 19):
                bounds.add(match(self._read(first, stop)))
        self.clocks = bounds.fit(spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._spool.close()

    @property
    def steps(self) -> int:
        """Number of steps that all ranks completed."""
        return int(self.recorded.shape[1])

    @property
    def world_size(self) -> int:
        """Number of ranks of the run, including ranks that left no trace."""
        return self.ranks[0].status.world_size

    def windows(self, first: int, stop: int, most_events: int) -> list[tuple[int, int]]:
        """Return windows of steps that cover `first` to `stop` - 1, each as its first and stop.

        A window has at most `most_events` events of all ranks together, but at least `BEFORE` + 1
        steps; and it begins and ends with steps that all ranks recorded.
        """
        whole = np.all(self.recorded, axis=0).tolist()
        sums = np.concatenate([[0], np.cumsum(self.event_counts)])
        found = []
        while first < stop:
            end = int(np.searchsorted(sums, sums[first] + most_events, side="right")) - 1
            end = max(end, first + BEFORE + 1)
            while end < stop and not (
                end >= self.steps or (whole[end - 1] and whole[min(end, self.steps - 1)])
            ):
                end += 1
            end = stop if stop - end <= BEFORE else end
            found.append((first, min(end, stop)))
            first = found[-1][1]
        return found

    def read(self, first: int, stop: int) -> Trace:
        """Return the matched events of steps `first` to `stop` - 1, and of the steps beside them.

        The last step, numbered `steps`, is what follows the last step that all ranks completed.
        """
        ranks = self._read(max(0, first - BEFORE), min(stop + AFTER, self.steps + 1))
        return on_one_clock(ranks, match(ranks), self.clocks)

    def each_rank(self) -> Iterator[RankTrace]:
        """Yield each rank's trace with all its events, ordered by step; one at a time."""
        return self._ranks(0, self.steps + 1)

    def _read(self, first: int, stop: int) -> Sequence[RankTrace]:
        return list(self._ranks(first, stop))

    def _ranks(self, first: int, stop: int) -> Iterator[RankTrace]:
        for rank, starts in zip(self.ranks, self._starts, strict=True):
            begin, end = (int(starts[at]) * EVENT_DTYPE.itemsize for at in (first, stop))
            self._spool.seek(begin)
            events = np.frombuffer(self._spool.read(end - begin), EVENT_DTYPE)
            yield dataclasses.replace(rank, events=events)
