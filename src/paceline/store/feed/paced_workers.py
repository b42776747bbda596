"""Paces the worker processes of torch's DataLoader. Imports torch, as loader.py does.

A DataLoader draws the next indices as it delivers a batch, and sends them to a worker at once: that
worker then computes beside the step that has just begun. Here the indices are drawn as before, so
that samplers draw the same random numbers at the same time, but they may be sent later.

    sampler --drawn, as ever--> held --as the pacer says--> queue of the worker chosen by torch

What is held goes out, in its order, before the loop waits for a batch, and before anything that is
not indices (a new epoch, the end). Workers, order and results are those of torch.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import dataloader

from paceline.store.feed.pacing import Pacer, Stock
from paceline.store.feed.phases import PHASES

if TYPE_CHECKING:
    from paceline.store.feed.options import Pace

_LOG = logging.getLogger(__name__)
BYTES_AHEAD = 256 << 20  # in flight; as `LoaderOptions.bytes_ahead`
# What is used of torch's iterators, 2.10 to 2.13.
_NEEDED = (
    "_data_queue",
    "_index_queues",
    "_next_data",
    "_num_workers",
    "_prefetch_factor",
    "_rcvd_idx",
    "_task_info",
    "_tasks_outstanding",
)
_MEASURED_ITEMS = 64  # of a batch: its bytes are those of its first tensors


class PacedWorkers:
    """Holds back what one iterator of a DataLoader sends to its workers.

    The loop's thread and hooks of backward passes call it, which may be different threads.

    Args:
        iterator: torch's, with worker processes, just made.
        bytes_ahead: the most bytes of batches in flight, unless nothing is ready.

    Attributes:
        pacer: that decides when something is sent.
    """

    def __init__(self, iterator: Any, bytes_ahead: int = BYTES_AHEAD) -> None:
        ahead = iterator._prefetch_factor * iterator._num_workers  # noqa: SLF001  # see `_NEEDED`
        self.pacer = Pacer(ahead, bytes_ahead)
        self._iterator = weakref.ref(iterator)
        self._held: deque[tuple[Any, Any]] = deque()  # queue of a worker, what goes there
        self._lock = threading.Lock()
        self._in_next = False
        self._batch_bytes = 0
        queues = iterator._index_queues  # noqa: SLF001
        iterator._index_queues = [_HoldingQueue(queue, self) for queue in queues]  # noqa: SLF001

    def put(self, queue: Any, item: Any) -> None:
        """Send an item to a worker's queue, now or later."""
        if not (isinstance(item, tuple) and len(item) == 2):
            self.send_all()
            queue.put(item)
            return
        with self._lock:
            self._held.append((queue, item))
        if not self._in_next:
            self.send()

    def before_next(self) -> None:
        """Send all that is held if the loop is about to wait."""
        self._in_next = True
        if self._will_wait():
            with self._lock:
                self.pacer.loop_waits()
            self.send_all()

    def after_next(self, batch: Any) -> None:
        """Note that the loop took a batch (None: it got an error, or the end)."""
        self._in_next = False
        if batch is None:
            self.send_all()
            return
        with self._lock:
            self._batch_bytes = _bytes_of(batch)
            self.pacer.step_begins(time.monotonic())
        self.send()

    def cores_are_free(self) -> None:
        """Send what the pacer lets go while the loop communicates or updates parameters."""
        self.pacer.cores_are_free()
        if self._held:
            self.send()

    def send(self) -> None:
        """Send what the pacer lets go now."""
        now_s = time.monotonic()
        with self._lock:
            while self._held and not self.pacer.wait_s(self._batch_bytes, self._stock(), now_s):
                queue, item = self._held.popleft()
                self.pacer.refill_begins(self._batch_bytes, now_s)
                queue.put(item)

    def send_all(self) -> None:
        """Send all that is held."""
        with self._lock:
            while self._held:
                queue, item = self._held.popleft()
                queue.put(item)

    def _will_wait(self) -> bool:
        """Return whether the next batch has not arrived, as far as is known.

        Other batches may have arrived, and it not; then what is held goes if it is among that.
        """
        iterator = self._iterator()
        if iterator is None:
            return True
        awaited = iterator._rcvd_idx  # noqa: SLF001
        if len(iterator._task_info.get(awaited, ())) == 2:  # noqa: SLF001
            return False
        return self._arrived(iterator) == 0 or (bool(self._held) and self._held[0][1][0] <= awaited)

    def _stock(self) -> Stock:
        iterator = self._iterator()
        if iterator is None:
            return Stock(0, 0)
        kept = sum(len(info) == 2 for info in iterator._task_info.values())  # noqa: SLF001
        sent = iterator._tasks_outstanding + kept - len(self._held)  # noqa: SLF001
        return Stock(kept + self._arrived(iterator), sent * self._batch_bytes)

    @staticmethod
    def _arrived(iterator: Any) -> int:
        """Return the batches that have come from workers and were not looked at."""
        try:
            return int(iterator._data_queue.qsize())  # noqa: SLF001
        except NotImplementedError:  # a system without semaphores that can be read
            return 0


class _HoldingQueue:
    """A worker's queue of indices, as torch uses it."""

    def __init__(self, queue: Any, owner: PacedWorkers) -> None:
        self._queue = queue
        self._owner = owner

    def put(self, item: Any) -> None:
        self._owner.put(self._queue, item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def is_paced(pace: Pace) -> bool:
    """Return whether input is paced; ``auto``: unless a GPU computes, beside which cores are free.

    Ask when a loader starts, and not before: it loads CUDA.
    """
    return pace == "on" or (pace == "auto" and not torch.cuda.is_available())


@functools.cache
def pace_data_loaders(wanted: Pace) -> None:
    """Pace each DataLoader with worker processes that this process makes from now on."""
    iterator = dataloader._MultiProcessingDataLoaderIter  # noqa: SLF001
    original = iterator.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_paced(wanted):
            pace(self)

    iterator.__init__ = init


def pace(iterator: Any, bytes_ahead: int = BYTES_AHEAD) -> None:
    """Pace one iterator of a DataLoader, unless it is paced or has no worker processes."""
    if pacing_of(iterator) is not None or getattr(iterator, "_num_workers", 1) == 0:
        return
    if missing := [name for name in _NEEDED if not hasattr(iterator, name)]:
        _say_unpaced(f"torch {torch.__version__}'s DataLoader has no {', '.join(missing)}")
        return
    paced = PacedWorkers(iterator, bytes_ahead)
    iterator._next_data = _PacedNext(iterator, paced)  # noqa: SLF001
    PHASES.add(paced)


def pacing_of(iterator: Any) -> PacedWorkers | None:
    """Return what paces an iterator of a DataLoader; None if nothing does."""
    next_data = getattr(iterator, "_next_data", None)
    return next_data.paced if isinstance(next_data, _PacedNext) else None


@functools.cache
def _say_unpaced(why: str) -> None:
    _LOG.warning("input is not paced: %s", why)


class _PacedNext:
    """What an iterator calls for its next batch; holds it weakly, so that it ends as ever."""

    def __init__(self, iterator: Any, paced: PacedWorkers) -> None:
        self._original = type(iterator)._next_data  # noqa: SLF001
        self._iterator = weakref.ref(iterator)
        self.paced = paced

    def __call__(self) -> Any:
        batch = None
        self.paced.before_next()
        try:
            batch = self._original(self._iterator())
        finally:
            self.paced.after_next(batch)
        return batch


def _bytes_of(batch: Any) -> int:
    """Return the bytes of the first tensors of a batch, also in lists, tuples and dicts."""
    total, ahead = 0, [batch]
    for _ in range(_MEASURED_ITEMS):
        if not ahead:
            break
        item = ahead.pop()
        if isinstance(item, torch.Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, dict):
            ahead += list(item.values())[:_MEASURED_ITEMS]
        elif isinstance(item, list | tuple):
            ahead += item[:_MEASURED_ITEMS]
    return total
