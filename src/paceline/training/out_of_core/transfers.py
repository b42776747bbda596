"""Transfers of bytes that may be away, and the lane that does one after the other.

    step's thread                      the lane's thread
    start(copy) -> SpillTransfer  ------->  copy, finish
    transfer.wait()              <-------  done, or the error

A target (`spill_target`) has one lane that writes and one that reads. On a GPU a lane is a stream
(`device`).
"""

from __future__ import annotations

import abc
import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT = 4096  # of memory, offsets and lengths: at least what any block device asks for
DEADLINE_S = 300.0  # of one transfer; a disk that takes longer does not answer


def aligned(size_bytes: int) -> int:
    """Return a size rounded up to the alignment.

    >>> aligned(1), aligned(4096)
    (4096, 4096)
    """
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def aligned_memory(size_bytes: int) -> torch.Tensor:
    """Return memory for direct transfers, shape (aligned size,), uint8.

    Blocks of the pool of tensors are aligned already.
    """
    size = aligned(size_bytes)
    memory = torch.empty(size, dtype=torch.uint8)
    if memory.data_ptr() % ALIGNMENT:
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        memory = memory.narrow(0, -memory.data_ptr() % ALIGNMENT, size)
    return memory


class Copy(NamedTuple):
    """What a lane does.

    Attributes:
        size_bytes: that move.
        run: moves them; gets what `allocate` returned.
        allocate: memory for what is read; None of a write.
        finish: called when all is moved; not where that failed, since what is not in the target is
            nowhere else.
        after: the transfer that must be done before.
    """

    size_bytes: int
    run: Callable[[torch.Tensor | None], None]
    allocate: Callable[[], torch.Tensor] | None = None
    finish: Callable[[], None] | None = None
    after: SpillTransfer | None = None


class SpillTransfer(abc.ABC):
    """One write or read that is under way.

    Attributes:
        bytes: what was read, shape (aligned size,), uint8; once it has been waited for.
    """

    bytes: torch.Tensor | None = None

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Have what the step does from now on come after the transfer.

        Raises:
            StorageError: the disk is full or failed.
            DeadlineExceeded: the disk does not answer.
        """


class Lane(abc.ABC):
    """Does one transfer after the other.

    Attributes:
        moved_bytes: so far.
        busy_s: seconds of these transfers.
        cpu_s: processor time of them.
        waited_s: that the step waited for them.
    """

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.busy_s = self.cpu_s = self.waited_s = 0.0

    @abc.abstractmethod
    def start(self, copy: Copy) -> SpillTransfer:
        """Begin a transfer, after those that were begun before. Of the step's thread."""

    @abc.abstractmethod
    def close(self) -> bool:
        """End after what is still to be done; return whether all is done."""


class ThreadLane(Lane):
    """A thread that copies, or writes to a file.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._copies: queue.SimpleQueue[ThreadTransfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, copy: Copy) -> ThreadTransfer:
        """Begin a transfer, after those that were begun before. Of the step's thread."""
        transfer = ThreadTransfer(self, copy)
        self._copies.put(transfer)
        return transfer

    def close(self) -> bool:
        """End after what is still to be done; return whether all is done."""
        self._copies.put(None)
        self._thread.join(DEADLINE_S)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (transfer := self._copies.get()) is not None:
            self._run(transfer)
            del transfer  # not held while waiting for the next

    def _run(self, transfer: ThreadTransfer) -> None:
        copy, transfer.copy = transfer.copy, None
        assert copy is not None
        try:
            if copy.after is not None:
                assert isinstance(copy.after, ThreadTransfer)
                copy.after.join()
            begin, begin_cpu = time.monotonic(), time.thread_time()
            try:
                memory = copy.allocate() if copy.allocate is not None else None
                copy.run(memory)
                transfer.bytes = memory
                self.moved_bytes += copy.size_bytes
                if copy.finish is not None:
                    copy.finish()  # frees the memory, before the step goes on
            finally:
                self.busy_s += time.monotonic() - begin
                self.cpu_s += time.thread_time() - begin_cpu
        except BaseException as problem:  # noqa: BLE001  # raised by `wait`
            transfer.problem = problem
        finally:
            del copy  # what it holds is memory, which is free when the step goes on
            transfer.done.set()


class ThreadTransfer(SpillTransfer):
    """A transfer of a thread; the step's thread waits for it."""

    __slots__ = ("_lane", "bytes", "copy", "done", "problem")

    def __init__(self, lane: ThreadLane, copy: Copy) -> None:
        self._lane = lane
        self.copy: Copy | None = copy
        self.bytes = None
        self.done = threading.Event()
        self.problem: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.done.is_set()

    def wait(self) -> None:
        """Wait until it is done, and count the seconds."""
        begin = time.monotonic()
        try:
            self.join()
        finally:
            self._lane.waited_s += time.monotonic() - begin

    def join(self) -> None:
        """Wait until it is done."""
        if not self.done.wait(DEADLINE_S):
            raise DeadlineExceeded(
                f"a transfer took more than {DEADLINE_S:g} s",
                where="spill file",
                why="the disk does not answer",
                fix="Choose another folder with spill_folder",
            )
        if self.problem is not None:
            raise self.problem
