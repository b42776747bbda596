"""Times what a DataLoader's workers do for a batch, in memory that they share with the loop.

    worker process                                          process of the loop
    --------------                                          -------------------
    fetch: data set | collate function  -> sums of worker   -> counters of the trace
    queue.put((index, batch))           -> ready[index]     -> when the batch was there to be taken

Torch starts its workers on a function of its own, `WorkerLoop` stands in its place: a forked worker
has hooks and memory from its parent, a worker that is spawned finds the memory by its path. Each
row has one writer, so that nothing is locked; a batch costs 10 us, whatever its samples.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_hooks import RAISED, RecordedKind, around

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.trace.collectors.torch_hooks import Arguments, Keywords

LOADERS, WORKERS = 64, 64  # more than these of a process are not timed
_READY = 512  # batches of a loader that may be on their way at one time
_LOST = internals.Capability.WORKER_LOOP.value


class Sum(IntEnum):
    """What is summed for each worker: counts, or nanoseconds; values are columns of its row."""

    BATCHES = 0
    SAMPLES = 1
    FETCH = 2
    CORE = 3
    FILES = 4
    COLLATE = 5
    QUEUED = 6


_COLUMNS = 8


class SharedTimes:
    """The memory: sums by loader and worker, and when each batch was ready.

    Attributes:
        path: by which a process that was not forked opens it.
        sums: by `Sum`, shape (LOADERS, WORKERS, 8).
        ready: batch number plus 1, and nanoseconds, by number modulo 512, shape (LOADERS, 512, 2).
    """

    def __init__(self, descriptor: int, path: str) -> None:
        count = LOADERS * (WORKERS * _COLUMNS + _READY * 2)
        self.path = path
        # The pages that are never used take no memory.
        words = np.frombuffer(mmap.mmap(descriptor, 8 * count), np.uint64)
        split = LOADERS * WORKERS * _COLUMNS
        self.sums = words[:split].reshape(LOADERS, WORKERS, _COLUMNS)
        self.ready = words[split:].reshape(LOADERS, _READY, 2)

    @classmethod
    def create(cls) -> Self:
        """Return new memory of this process, without a file that could be left behind.

        Raises:
            OSError: there is no memory for it.
        """
        descriptor = os.memfd_create("paceline-loaders")
        os.ftruncate(descriptor, 8 * LOADERS * (WORKERS * _COLUMNS + _READY * 2))
        return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")

    @classmethod
    def open(cls, path: str) -> Self:
        """Return the memory of the process that started this one.

        Raises:
            OSError: it is gone.
        """
        with Path(path).open("r+b") as file:
            return cls(file.fileno(), path)

    def has(self, loader: int, worker: int = 0) -> bool:
        """Return whether there is a row for a worker of a loader."""
        return 0 < loader < LOADERS and 0 <= worker < WORKERS

    def note_ready(self, loader: int, number: int) -> None:
        """Note that a worker gives batch `number` away now."""
        entry = self.ready[loader, number % _READY]
        entry[1] = monotonic_ns()
        entry[0] = number + 1

    def ready_ns(self, loader: int, number: int) -> int | None:
        """Return when batch `number` was given away; None if that is not known."""
        entry = self.ready[loader, number % _READY]
        return int(entry[1]) if entry[0] == number + 1 else None


class _Fetch(NamedTuple):
    """A call of `fetch` that is under way."""

    row: Any  # array, shape [Sum]; None where the data set is done
    begin_ns: int
    core_ns: int
    queued_ns: int
    files_ns: int


class QueuedClock:
    """Nanoseconds for which the calling thread was runnable and had no core, as the kernel counts.

    The file is of the thread that opened it: each thread, and each forked process, opens its own.
    """

    PATH = Path("/proc/thread-self/schedstat")

    def __init__(self) -> None:
        self._thread = 0
        self._file: int | None = None

    @classmethod
    def is_there(cls) -> bool:
        """Return whether this kernel has it."""
        return cls.PATH.exists()

    def __call__(self) -> int:
        """Return the count; 0 where it cannot be read."""
        thread = threading.get_native_id()
        try:
            if thread != self._thread or self._file is None:
                self._open(thread)
            assert self._file is not None
            return int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, IndexError):
            return 0

    def _open(self, thread: int) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._file = os.open(self.PATH, os.O_RDONLY | os.O_CLOEXEC)
        self._thread = thread


class FetchTimer:
    """Adds what this process fetches and collates to a row; used by one thread.

    Attributes:
        row: of the worker that this process is, or of the loader without workers that the loop
            waits for; None: nothing is timed.
    """

    def __init__(self) -> None:
        self.row: np.ndarray | None = None
        self.kind = RecordedKind(_LOST)
        self._files_ns = files_clock()
        self._queued_ns = QueuedClock()
        self._fetched: _Fetch | None = None  # when the data set was done
        self._samples = 0

    def hooks(self) -> list[tuple[type, str, Callable[..., Any]]]:
        """Return what replaces attributes of torch's classes, with class and attribute."""
        return [
            (owner, "fetch", around(vars(owner)["fetch"], self.kind, self._before, self._after))
            for owner in internals.fetchers()
        ]

    def _before(self, args: Arguments, _kwargs: Keywords) -> _Fetch | None:
        if self.row is None:
            return None
        fetcher = args[0]
        if not isinstance(fetcher.collate_fn, _NotedCollate):
            fetcher.collate_fn = _NotedCollate(fetcher.collate_fn, fetcher.auto_collation, self)
        row, self.row = self.row, None  # a data set may have a loader of its own
        self._fetched, self._samples = None, 0
        begin_ns = monotonic_ns()
        return _Fetch(row, begin_ns, *self._other_clocks())

    def fetched(self, data: Any, is_list: bool) -> None:
        """Note that the data set gave its samples, which are joined to a batch next."""
        self._samples = len(data) if is_list else 0
        # The clocks of the core and of the calls are read within the interval of the wall clock, so
        # that neither counts more than it.
        clocks = self._other_clocks()
        self._fetched = _Fetch(None, monotonic_ns(), *clocks)

    def _after(self, begun: _Fetch, result: Any, _args: Arguments, _kwargs: Keywords) -> None:
        self.row = row = begun.row
        if result is RAISED or self._fetched is None:
            return
        end_ns, fetched = monotonic_ns(), self._fetched
        row[Sum.BATCHES] += 1
        row[Sum.SAMPLES] += self._samples
        row[Sum.FETCH] += fetched.begin_ns - begun.begin_ns
        row[Sum.CORE] += fetched.core_ns - begun.core_ns
        row[Sum.QUEUED] += fetched.queued_ns - begun.queued_ns
        row[Sum.FILES] += fetched.files_ns - begun.files_ns
        row[Sum.COLLATE] += end_ns - fetched.begin_ns

    def _other_clocks(self) -> tuple[int, int, int]:
        files_ns = self._files_ns() if self._files_ns is not None else 0
        return time.thread_time_ns(), self._queued_ns(), files_ns


class _NotedCollate:
    """A loader's function that joins samples to a batch, which notes when it is called."""

    def __init__(self, original: Callable[[Any], Any], is_list: bool, timer: FetchTimer) -> None:
        self._original = original
        self._is_list = is_list
        self._timer = timer

    def __call__(self, data: Any) -> Any:
        self._timer.kind.attempt(self._timer.fetched, data, self._is_list)
        return self._original(data)

    internals.calls_the_script(__call__)


class _NotedQueue:
    """A worker's queue of batches, which notes when a batch is put into it."""

    def __init__(self, queue: Any, note: Callable[[Any], None]) -> None:
        self._queue = queue
        self._note = note

    def put(self, item: Any) -> None:
        self._note(item)
        self._queue.put(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class WorkerLoop:
    """What torch starts its workers on: its own function, timed.

    Attributes:
        loader: number of the loader whose workers are started next; 0: of none that is timed.
    """

    def __init__(
        self, original: Callable[..., None], times: SharedTimes, timer: FetchTimer
    ) -> None:
        self.loader = 0
        self._original = original
        self._times = times
        self._timer = timer

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_new_process, (self._times.path, self.loader)

    def hook(self) -> None:
        """Put the hooks in place in a process that did not inherit them."""
        for owner, attribute, hooked in self._timer.hooks():
            setattr(owner, attribute, hooked)

    def __call__(self, *args: Any) -> None:
        """Run a worker, with the arguments that torch gives to its own function."""
        noted = self._timer.kind.attempt(self._timed, args)
        self._original(*(args if noted is None else noted))

    internals.calls_the_script(__call__)

    def _timed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._timer.row = None
        names = internals.worker_arguments(self._original)
        worker, queue_at = args[names["worker_id"]], names["data_queue"]
        if not self._times.has(self.loader, worker):
            return args
        self._timer.row = self._times.sums[self.loader, worker]
        noted = list(args)
        noted[queue_at] = _NotedQueue(args[queue_at], self._note_ready)
        return tuple(noted)

    def _note_ready(self, item: Any) -> None:
        self._timer.kind.attempt(self._note_item, item)

    def _note_item(self, item: Any) -> None:
        number, _ = item
        if isinstance(number, int):  # not the answer to a new epoch
            self._times.note_ready(self.loader, number)


def _in_new_process(path: str, loader: int) -> Callable[..., None]:
    """Return what a spawned worker runs: without the memory of its loader, torch's own function."""
    original, timer = internals.worker_loop(), FetchTimer()

    def started() -> WorkerLoop:
        loop = WorkerLoop(original, SharedTimes.open(path), timer)
        loop.loader = loader
        loop.hook()
        return loop

    return timer.kind.attempt(started) or original


@functools.cache
def files_clock() -> Callable[[], int] | None:
    """Return what tells how long this thread was in calls for files; None: they do not count.

    It is in the library that `--record-io` preloads (native/io).
    """
    try:
        clock: Any = ctypes.CDLL(None).paceline_io_fetch_ns
    except AttributeError:
        return None
    clock.restype, clock.argtypes = ctypes.c_uint64, []
    return clock  # type: ignore[no-any-return]  # ctypes has no types for it
