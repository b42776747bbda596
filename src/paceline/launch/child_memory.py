"""Watches the memory of the processes that ranks start, from outside: loader workers, mostly.

    /proc/PID/smaps_rollup, stat of each process below a rank  ->  a sample
    samples of the same processes, one after the other         ->  RUN/children/rank-00000.json

A forked worker shares its parent's pages until one of them writes there; then each has its own
(copy-on-write). Python writes the count of references into every object that it looks at, so that
workers which only read a list of Python objects copy it, page by page. The resident size does not
show it: private memory does. A page that the parent writes becomes the worker's own as well, but
without a page fault of the worker's: those are counted, too.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from paceline.core.errors import PacelineError
from paceline.core.files import commit_text
from paceline.core.processes import boot_id, stat_fields, trees
from paceline.runs.child_memory import ChildMemory, file_name
from paceline.trace.format.events import MAIN
from paceline.trace.format.files import read_status, read_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.clock import Clock

_LOG = logging.getLogger(__name__)
_FIRST_S, _INTERVAL_S = 0.5, 10.0  # between samples: they take 5 ms for each GB that is mapped
_GROWS = 1.3  # from the first interval to the longest
_START_UP_S = 1.0  # what a worker allocates by then is not what it grows by
_MOST_PROCESSES = 64  # of a rank that are looked at


class ChildBytes(NamedTuple):
    """The memory of a process, or of several."""

    private_bytes: int
    shared_bytes: int  # pages that other processes map as well
    faulted_bytes: int  # pages that were mapped or copied as it touched them, since its start


class _Sample(NamedTuple):
    at_s: float
    memory: ChildBytes


class ChildMemoryLog:
    """Samples of one rank's processes: those of each time in which they were the same ones."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._processes: frozenset[int] = frozenset()
        self._first: _Sample | None = None
        self._samples: list[_Sample] = []  # since they started up
        self._most: ChildMemory | None = None

    def note(self, memory: Mapping[int, ChildBytes], now_s: float) -> None:
        """Note the memory of each process."""
        if self._processes != memory.keys():
            self._keep_most()
            self._processes, self._samples, self._first = frozenset(memory), [], None
        if not memory:
            return
        sample = _Sample(now_s, ChildBytes(*map(sum, zip(*memory.values(), strict=True))))
        self._first = self._first or sample
        if now_s - self._first.at_s >= _START_UP_S:
            self._samples.append(sample)

    def result(self) -> ChildMemory | None:
        """Return those whose private memory grew most; None if none were seen for long."""
        self._keep_most()
        return self._most

    def _keep_most(self) -> None:
        if self._first is None or len(self._samples) < 3:
            return
        first, last = self._samples[0], self._samples[-1]
        half_s = (first.at_s + last.at_s) / 2
        middle = min(self._samples, key=lambda sample: abs(sample.at_s - half_s))
        growth = last.memory.private_bytes - first.memory.private_bytes
        late = last.memory.private_bytes - middle.memory.private_bytes
        found = ChildMemory(
            rank=self._rank,
            processes=len(self._processes),
            seconds=last.at_s - first.at_s,
            private_bytes=first.memory.private_bytes,
            last_private_bytes=last.memory.private_bytes,
            steady=min(1.0, max(0.0, late / growth)) if growth > 0 else 0.0,
            copied_bytes=_copied(self._first.memory, last.memory),
        )
        if self._most is None or _size(found) >= _size(self._most):
            self._most = found


def _size(memory: ChildMemory) -> int:
    return max(memory.growth_bytes, memory.copied_bytes)


def _copied(first: ChildBytes, last: ChildBytes) -> int:
    lost = first.shared_bytes - last.shared_bytes
    return max(0, min(lost, last.faulted_bytes - first.faulted_bytes))


class ChildMemoryWatcher:
    """Watches the processes below this launcher's ranks, in a thread of its own.

    Args:
        run: the run's folder.
        clock: for waits and times.
        is_on: False: nothing is watched.
    """

    def __init__(self, run: Path, clock: Clock, *, is_on: bool = True) -> None:
        self.run = run
        self.clock = clock
        self._is_on = is_on
        self._boot = ""
        self._ranks: dict[Path, tuple[int, int]] = {}  # rank and process of each trace
        self._logs: dict[int, ChildMemoryLog] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-children", daemon=True)

    def __enter__(self) -> Self:
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._is_on:
            self._thread.join()
            self._write()

    def _watch(self) -> None:
        try:
            self._boot = boot_id()
            interval_s = _FIRST_S
            while not self.clock.wait(self._ended, interval_s):
                self._look()
                if self._logs:
                    interval_s = min(_INTERVAL_S, interval_s * _GROWS)
        except Exception:  # noqa: BLE001  # whatever it is: the run goes on without it
            _LOG.exception("the memory of the ranks' processes is no longer watched")

    def _look(self) -> None:
        self._find_ranks()
        if not self._ranks:
            return
        own, *below = trees([os.getpid(), *(process for _, process in self._ranks.values())])
        for (rank, process), children in zip(self._ranks.values(), below, strict=True):
            if process not in own:  # of another launcher, or it has ended
                continue
            memory = {
                child: found
                for child in children[:_MOST_PROCESSES]
                if (found := memory_of(child)) is not None
            }
            if memory or rank in self._logs:
                log = self._logs.setdefault(rank, ChildMemoryLog(rank))
                log.note(memory, self.clock.now_s())

    def _find_ranks(self) -> None:
        for path in (self.run / "trace").glob("rank-*.trace"):
            if path in self._ranks:
                continue
            try:
                status, tables = read_status(path), read_tables(path)
            except (OSError, PacelineError):  # just being made
                continue
            if status.boot_id == self._boot and len(tables.locations) > MAIN:
                self._ranks[path] = (status.rank, tables.locations[MAIN].process)

    def _write(self) -> None:
        for rank, log in self._logs.items():
            if (found := log.result()) is None:
                continue
            path = self.run / file_name(rank)
            try:
                path.parent.mkdir(exist_ok=True)
                commit_text(path, found.to_text())
            except (OSError, PacelineError) as problem:  # a full disk
                _LOG.warning("%s", problem)
                return


def memory_of(process: int) -> ChildBytes | None:
    """Return a process's memory; None if it has ended, or may not be looked at.

    Shared are libraries, and what forked processes have not written since. Memory that was swapped
    out counts as private.
    """
    path = Path("/proc") / str(process) / "smaps_rollup"
    try:
        lines = path.read_text("ascii", "replace").splitlines()[1:]
        faults = int(stat_fields(process)[7])  # minflt of proc(5)
    except OSError:
        return None
    sizes = {}
    for line in lines:
        name, _, size = line.partition(":")
        sizes[name] = int(size.split()[0]) << 10
    if not sizes:  # it is ending
        return None
    return ChildBytes(
        sizes["Private_Clean"] + sizes["Private_Dirty"] + sizes.get("SwapPss", 0),
        sizes["Shared_Clean"] + sizes["Shared_Dirty"],
        faults * mmap.PAGESIZE,
    )
