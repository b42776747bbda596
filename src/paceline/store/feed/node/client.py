"""A rank's side of the node's reader: samples of a step as views of memory that ranks share."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.config import environment
from paceline.core.errors import DeadlineExceeded
from paceline.store.feed.node.ring import RankWord, Ring, Window, Word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from paceline.store.feed.node.turns import TurnServer

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.2  # how often a waiting rank looks whether the reader is alive
_PATIENCE_S = 10.0  # for other ranks of the node, before this one reads by itself
_START_S = 10.0  # that a reader may take from its start to its lock
_FRUITLESS_STARTS = 3  # readers that die without publishing anything

_running: list[subprocess.Popen[bytes]] = []  # readers that end when all their ranks have left


class _WindowLease:
    """Memory of a window that no one else writes to while an array refers to this object."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, data: NDArray[np.uint8]) -> None:
        address = data.__array_interface__["data"][0]
        self.__array_interface__: Mapping[str, Any] = {
            "version": 3,
            "shape": data.shape,
            "typestr": "|u1",
            "data": (address, False),  # each sample has bytes of its own, for one rank
        }


class NodeSamples:
    """The bytes of a rank's samples of one step, in memory that the ranks of the node share.

    They are this rank's alone while a view of them, or an array made of one, is referenced.

    Attributes:
        data: the memory they lie in; it is leased until nothing refers to it.
        begins: where each begins in `data`, shape (samples,).
        lengths: of each sample, in bytes, shape (samples,).
    """

    def __init__(
        self, data: NDArray[np.uint8], begins: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        self.data = data
        self.begins = begins
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[memoryview]:
        view = self.data.data
        for begin, length in zip(self.begins.tolist(), self.lengths.tolist(), strict=True):
            yield view[begin : begin + length]

    @property
    def size_bytes(self) -> int:
        """Bytes of all samples."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class NodePass:
    """One pass over the data, as the node's reader reads it for this rank."""

    client: NodeClient
    number: int

    def take(self, step: int, samples: int) -> NodeSamples | None:
        """Return the samples of a step; see `NodeClient.take`."""
        return self.client.take(self.number, step, samples)


class NodeClient:
    """What a rank asks of the node's reader, which it starts again when that has died.

    Threads may take steps in any order; each step of a pass is taken once.

    Args:
        ring: shared by the ranks of the node.
        local_rank: of this process on the node, from 0.
        rank: of this process in the job.
        timeout_s: longest wait for a step.
    """

    def __init__(self, ring: Ring, local_rank: int, rank: int, timeout_s: float) -> None:
        self.ring = ring
        self._words = ring.words
        self._local_rank = local_rank
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pass = 0
        self._windows: list[Window] = []  # published for this pass, without those below `_next`
        self._next = 0  # windows of this pass of which all steps were taken
        self._low = 0  # all steps below it were taken
        self._taken: set[int] = set()  # steps above it that were taken as well
        self._held: Counter[int] = Counter()  # leases by window
        # What finalizers append to, whatever thread and lock the garbage collector finds them in.
        self._dropped: deque[int] = deque()
        self._starts = (0, 0)  # readers started by this rank since windows were published last
        self._child: subprocess.Popen[bytes] | None = None
        self._child_number = 0
        self.turns: TurnServer | None = None  # of the job, on its first rank; closed when it leaves
        self._stuck_at = -1  # READER_CHANGED when the reader waited for other ranks for too long
        self._crowded_by = -1  # the oldest held window when the reader was stuck for want of room
        self._leaves = False
        self.own_reads = 0  # steps that the rank had to read by itself
        ring.lock(1 + local_rank)
        self._set(RankWord.PROCESS, os.getpid())
        self._set(RankWord.RANK, rank + 1)
        self._words.notify(Word.RANKS_CHANGED)

    @property
    def reader_pid(self) -> int | None:
        """Process id of the reader that this rank started last, if it did."""
        return None if self._child is None else self._child.pid

    def begin(self, epoch: int, position: int) -> NodePass:
        """Ask for a pass from a position of an epoch on."""
        with self._lock:
            self._pass += 1
            self._windows, self._next, self._low = [], 0, 0
            self._taken.clear()
            self._stuck_at = -1
            self._set(RankWord.PASS, 0)
            self._set(RankWord.EPOCH, epoch)
            self._set(RankWord.POSITION, position)
            self._settle()
            self._set(RankWord.PASS, self._pass)
        self._words.notify(Word.RANKS_CHANGED)
        return NodePass(self, self._pass)

    def take(self, number: int, step: int, samples: int) -> NodeSamples | None:
        """Return the samples of a step of a pass; None: the rank must read them by itself.

        That is so for samples that are damaged or larger than the ring, when the program holds on
        to so many batches that there is no room, and when the reader cannot read.

        Raises:
            DeadlineExceeded: the reader did not read it in time.
        """
        window = self._await(number, step)
        found = None if window is None else self._lease(window, step, samples)
        with self._lock:
            if number == self._pass:
                self._taken.add(step)
                self.own_reads += found is None
                self._settle()
        self._words.notify(Word.RANKS_CHANGED)
        return found

    def leave(self) -> None:
        """Need the reader no more; what was taken stays valid as long as it is referenced."""
        with self._lock:
            self._pass += 1
            self._leaves = True
            self._set(RankWord.PASS, self._pass)  # that nobody will serve
            self._settle()
        if self.turns is not None:
            self.turns.close()
        self._words.notify(Word.RANKS_CHANGED)

    def _set(self, word: int, value: int) -> None:
        self._words.store(self.ring.rank_word(self._local_rank, word), value)

    def _await(self, number: int, step: int) -> Window | None:
        began_s = time.monotonic()
        while True:
            seen = self._words.load(Word.READER_CHANGED)
            with self._lock:
                self._settle()
                if number != self._pass or self._is_hopeless(number):
                    return None
                window = self._window_of(step)
                if window is not None:
                    self._held[window.number] += 1  # from here on it stays
                    self._settle()
                    return window
                if self._is_crowded() or self._stuck_at == seen:
                    return None
            self._words.wait(Word.READER_CHANGED, seen, _LOOK_S)
            if self._words.load(Word.READER_CHANGED) == seen:
                if not self._ensure_reader():
                    return None
                if self._waits_for_ranks(number, time.monotonic() - began_s):
                    self._stuck_at = seen
                    return None
            if time.monotonic() > began_s + self._timeout_s:
                raise DeadlineExceeded(
                    f"the node's reader did not read step {step} within {self._timeout_s:g} s",
                    where=self.ring.config.pack,
                    why="storage is slow, or the reader was stopped",
                    fix='Raise timeout_s, or give node_reader="off"',
                )

    def _waits_for_ranks(self, number: int, waited_s: float) -> bool:
        """Return whether the reader cannot go on before other ranks do, and that for too long."""
        needs_room = self._words.load(Word.WAITS_FOR_ROOM) != 0
        if needs_room:
            with self._lock:
                self._crowded_by = self._window_in_the_way()
        if waited_s < _PATIENCE_S or not (needs_room or self._words.load(Word.SERVED) != number):
            return False
        if self._stuck_at < 0:
            _LOG.warning(
                "another rank of this node has not begun the pass, or does not take its batches: "
                "this one reads by itself until it does"
            )
        return True

    def _window_in_the_way(self) -> int:
        """Return the oldest held window if the reader waits for that alone, else -1; with lock."""
        held = min(self._held, default=-1)
        others = (rank for rank in range(self.ring.ranks) if rank != self._local_rank)
        to_take = (self.ring.still_to_take(rank) for rank in others)
        return -1 if any(first is not None and first <= held for first in to_take) else held

    def _is_crowded(self) -> bool:
        """Return whether the reader has no room since the program holds on to an old window."""
        return self._crowded_by >= 0 and self._crowded_by == min(self._held, default=-1)

    def _is_hopeless(self, number: int) -> bool:
        return bool(self._words.load(Word.HOPELESS) or self._words.load(Word.REFUSED) >= number)

    def _window_of(self, step: int) -> Window | None:
        """Return the window of a step, once it is published; with the lock."""
        if self._words.load(Word.SERVED) != self._pass:
            return None
        first = self._words.load(Word.PASS_FIRST)
        known = first + self._next + len(self._windows)
        for number in range(known, self._words.load(Word.PUBLISHED)):
            self._windows.append(self.ring.window(number))
        for window in self._windows:
            if window.first_step <= step < window.end_step:
                return window
        return None

    def _lease(self, window: Window, step: int, samples: int) -> NodeSamples | None:
        """Return the samples of a step of a window that is held; None: some are damaged."""
        lease = _WindowLease(self.ring.data)
        ended = weakref.finalize(lease, self._drop, window.number)
        ended.atexit = False  # the kernel tells the reader of the end of this process
        if not window.size_bytes:
            return None
        begins, lengths = self.ring.samples_of(window, step, self._local_rank)
        if len(lengths) != samples or (lengths < 0).any():
            return None
        return NodeSamples(np.asarray(lease), begins.copy(), lengths.copy())

    def _drop(self, window: int) -> None:
        """Note that a lease has ended; called by the garbage collector, so it takes no lock."""
        self._dropped.append(window)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
            self._words.notify(Word.RANKS_CHANGED)

    def _settle(self) -> None:
        """Tell the reader what is not needed any more; with the lock."""
        while self._dropped:
            window = self._dropped.popleft()
            self._held[window] -= 1
            if not self._held[window]:
                del self._held[window]
        # Before NEXT, which no longer covers what is held.
        self._set(RankWord.HELD, min(self._held, default=-1) + 1)
        while self._low in self._taken:
            self._taken.remove(self._low)
            self._low += 1
        while self._windows and self._windows[0].end_step <= self._low:
            self._windows.pop(0)
            self._next += 1
        self._set(RankWord.NEXT, self._next)
        if self._leaves and not self._held:
            self._set(RankWord.LEFT, 1)

    def _ensure_reader(self) -> bool:
        """Start a reader if the last one has died; False: they die again and again."""
        readers = self._words.load(Word.READERS)
        if self.ring.is_locked(0) or self._is_starting(readers):
            return True
        published = self._words.load(Word.PUBLISHED)
        starts, at = self._starts
        starts = starts + 1 if at == published else 1
        if starts > _FRUITLESS_STARTS:
            if not self._words.load(Word.HOPELESS):
                _LOG.warning("the node's reader died %d times: ranks read by themselves", starts)
                self._words.store(Word.HOPELESS, 1)
            return False
        if self.start_reader(readers):
            self._starts = (starts, published)
        return True

    def _is_starting(self, readers: int) -> bool:
        """Return whether the reader that was started last may still be on its way to its lock."""
        if self._words.load(Word.READY) >= readers:
            return False
        if self._child is not None and self._child_number == readers:
            return self._child.poll() is None
        return time.monotonic_ns() < self._words.load(Word.STARTED_NS) + int(_START_S * 1e9)

    def start_reader(self, readers: int = 0) -> bool:
        """Start a process that reads for the node; False: another rank did.

        Args:
            readers: how many were started before.
        """
        if not self._words.exchange(Word.READERS, readers, readers + 1):
            return False
        self._words.store(Word.STARTED_NS, time.monotonic_ns())
        descriptor = self.ring.descriptor
        name = "paceline.store.feed.node.reader"
        self._child_number = readers + 1
        self._child = subprocess.Popen(
            # Not from the folder of the user's script, whose modules may have names of Python's.
            [sys.executable, "-P", "-m", name, str(descriptor), str(self._child_number)],
            pass_fds=(descriptor,),
            env={key: value for key, value in environment().items() if not _is_of_rank(key)},
            stdin=subprocess.DEVNULL,
        )
        _running[:] = [child for child in _running if child.poll() is None]
        _running.append(self._child)
        return True


def _is_of_rank(key: str) -> bool:
    """Return whether an environment variable would make the reader a rank, or record it."""
    return key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") or key.startswith(
        "_PACELINE_"
    )
