"""Threads that prefetch results for a consumer, in the order of the tasks.

Prefetched results are bounded in number and in bytes, so that a slow consumer throttles the
workers. A thread that fails delivers its error in place of the result, after all earlier results.

::

    tasks --claim--> [ being made | made, waiting ] --deliver, in order--> consumer
                     '---- at most `ahead` and `bytes_ahead` ----'

With a `Pacer` a claim may also wait for the part of the consumer's step that leaves cores free.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from paceline.core.errors import DeadlineExceeded, UsageError
from paceline.store.feed.pacing import NEXT_EVENT_S, Pacer, Stock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CLOSE_S = 1.0  # to wait for the lock, on closing
_EXIT_S = 5.0  # what a thread that is still at work gets when the interpreter ends

_live: weakref.WeakSet[OrderedThreads] = weakref.WeakSet()  # type: ignore[type-arg]  # of any kind


class Sized(Protocol):
    """A task or a result that says how much memory it stands for."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it holds, or will hold."""


Task = TypeVar("Task", bound=Sized)
Result = TypeVar("Result", bound=Sized)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How far the threads may work ahead, and how long the consumer waits for one of them."""

    ahead: int
    bytes_ahead: int
    timeout_s: float


@dataclass(slots=True)
class _Slot(Generic[Result]):
    """A task that a thread has claimed."""

    worker: str
    size_bytes: int
    result: Result | None = None
    error: BaseException | None = None
    done: bool = False


class OrderedThreads(Generic[Task, Result]):
    """Makes `make(task)` of each task on several threads; `next` hands the results out in order.

    Args:
        tasks: drawn under a lock, one at a time, as there is room.
        make: what the threads do; called from all of them at once.
        threads: how many.
        bounds: on what is ahead of the consumer. The size of what is being made is the task's
            own estimate, so a bound on bytes may be passed by what is in the making.
        name: first part of the threads' names; their number follows.
        describe: says, for an error, what the thread of that name is working on.
        prepare: each thread calls it before anything else; an exception from it ends the thread.
        pacer: says when the next task may begin; None: as soon as there is room.

    The threads hold this object, so drop whatever owns it and call `close`; at the interpreter's
    end those that are left are closed.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        make: Callable[[Task], Result],
        *,
        threads: int,
        bounds: Bounds,
        name: str,
        describe: Callable[[str], str] = lambda _: "",
        prepare: Callable[[], None] = lambda: None,
        pacer: Pacer | None = None,
    ) -> None:
        self._tasks = tasks
        self._make = make
        self._bounds = bounds
        self._describe = describe
        self._prepare = prepare
        self.pacer = pacer
        self._waiting: Task | None = None  # drawn, and too large for now
        self._slots: dict[int, _Slot[Result]] = {}
        self._claimed = self._delivered = self._bytes = 0
        self._exhausted = self._closed = False
        # Re-entrant: the collector of garbage may call `close` wherever it is held.
        self._lock = threading.RLock()
        self._room, self._ready = threading.Condition(self._lock), threading.Condition(self._lock)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        _live.add(self)
        for thread in self._threads:
            thread.start()

    def next(self) -> Result:
        """Return the next result.

        Raises:
            StopIteration: that was the last.
            DeadlineExceeded: its thread has not finished yet. The caller may ask again.
            UsageError: the threads were closed, by `close` or by an error.
            Exception: what the thread that should have made it raised.
        """
        if not self._lock.acquire(timeout=self._bounds.timeout_s):
            raise self._late("the thread that prepares the next batch")
        try:
            if self.pacer is not None and not self._next_is_there():
                self.pacer.loop_waits()
                self._room.notify_all()
            came = self._ready.wait_for(self._next_is_there, self._bounds.timeout_s)
            slot = self._slots.get(self._delivered)
            if not came:
                raise self._late(slot.worker if slot else "the thread that prepares the next batch")
            if slot is None:
                self._refuse_closed()
                raise StopIteration
            del self._slots[self._delivered]
            self._delivered += 1
            self._bytes -= slot.size_bytes
            if self.pacer is not None:
                self.pacer.step_begins(time.monotonic())
            self._room.notify()
        finally:
            self._lock.release()
        if slot.error is not None:
            self.close()
            raise slot.error
        assert slot.result is not None
        return slot.result

    def cores_are_free(self) -> None:
        """Let threads begin what the pacer held back, as the consumer leaves cores free."""
        if self.pacer is None:
            return
        self.pacer.cores_are_free()
        # A thread that draws a task has the lock, perhaps for long, and asks the pacer afterwards.
        if self._lock.acquire(blocking=False):
            try:
                self._room.notify_all()
            finally:
                self._lock.release()

    def close(self, join_s: float = 0.0) -> None:
        """Let no thread begin another task; wait up to `join_s` for each to end."""
        self._closed = True
        if self._lock.acquire(timeout=max(join_s, _CLOSE_S)):  # a task may hang while it is drawn
            try:
                self._slots.clear()
                self._room.notify_all()
                self._ready.notify_all()
            finally:
                self._lock.release()
        if join_s:
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(join_s)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(
                "the worker threads are closed",
                why="they were stopped, or one of them failed",
                fix="Start a new iteration over the loader",
            )

    def _next_is_there(self) -> bool:
        slot = self._slots.get(self._delivered)
        if slot is not None:
            return slot.done
        return self._closed or (self._exhausted and self._delivered == self._claimed)

    def _work(self) -> None:
        me = threading.current_thread().name
        self._prepare()
        while (claim := self._claim(me)) is not None:
            task, slot = claim
            try:
                slot.result = self._make(task)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the consumer gets it
                slot.error = error
            self._finish(slot)
            del task, slot, claim  # nothing is kept while waiting

    def _claim(self, worker: str) -> tuple[Task, _Slot[Result]] | None:
        with self._room:
            while not (self._closed or self._exhausted):
                task = self._draw()
                if task is None:
                    break
                wait_s = self._wait_s(task)
                if not wait_s:
                    self._waiting = None
                    slot = self._slots[self._claimed] = _Slot[Result](worker, task.size_bytes)
                    self._claimed += 1
                    self._bytes += slot.size_bytes
                    if self.pacer is not None:
                        self.pacer.refill_begins(task.size_bytes, time.monotonic())
                    self._room.notify()
                    return task, slot
                # Ends with the next delivery and with close(), too.
                self._room.wait(wait_s if wait_s < NEXT_EVENT_S else None)
            self._room.notify_all()
            self._ready.notify_all()
            return None

    def _draw(self) -> Task | None:
        if self._waiting is None:
            try:
                self._waiting = next(self._tasks, None)
            except Exception as error:  # noqa: BLE001  # as in _work
                self._slots[self._claimed] = _Slot("", 0, error=error, done=True)
                self._claimed += 1
            self._exhausted = self._waiting is None
        return self._waiting

    def _wait_s(self, task: Task) -> float:
        """Return 0 if the task may begin, else the seconds after which to ask again."""
        if not self._fits(task):
            return NEXT_EVENT_S
        if self.pacer is None:
            return 0.0
        stock = Stock(self._ready_count(), self._bytes)
        return self.pacer.wait_s(task.size_bytes, stock, time.monotonic())

    def _ready_count(self) -> int:
        """Return the results that the consumer can take without waiting."""
        number = self._delivered
        while (slot := self._slots.get(number)) is not None and slot.done:
            number += 1
        return number - self._delivered

    def _fits(self, task: Task) -> bool:
        ahead = self._claimed - self._delivered
        room = self._bytes + task.size_bytes <= self._bounds.bytes_ahead
        return ahead == 0 or (ahead < self._bounds.ahead and room)

    def _finish(self, slot: _Slot[Result]) -> None:
        with self._ready:
            size = slot.result.size_bytes if slot.result is not None else 0
            self._bytes += size - slot.size_bytes
            slot.size_bytes = size
            slot.done = True
            self._ready.notify()

    def _late(self, worker: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{worker} did not deliver within {self._bounds.timeout_s:g} s",
            where=self._describe(worker),
            why="it is still at work, or the storage does not answer",
            fix="Look at the transform and the storage, or raise timeout_s",
        )


@atexit.register
def _close_all() -> None:
    """Let threads end before the interpreter takes their modules away."""
    for threads in list(_live):
        threads.close(_EXIT_S)
