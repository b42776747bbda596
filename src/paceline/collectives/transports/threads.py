"""Ranks as threads of one process: no launcher, no sockets, and the strictest message passing.

A send waits until its receive has copied the data (a rendezvous, nothing is buffered), as MPI and
NCCL may do with large messages: a schedule that runs here does not rely on buffers.

Threads meet in the queues of `ThreadGroup` and in the event of each letter. A sender does not touch
the array of a letter between posting it and its event; the receiver reads it in that time only.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Result = TypeVar("Result")


class _Letter(NamedTuple):
    """An array on its way, and the event that its receiver sets when it has copied it."""

    array: Any
    copied: threading.Event


class ThreadGroup:
    """The ranks of a group, each a thread of this process."""

    def __init__(self, ranks: int) -> None:
        """Make a group of `ranks`."""
        self.ranks = ranks
        self.boxes: dict[tuple[int, int], queue.SimpleQueue[_Letter]] = {
            (source, destination): queue.SimpleQueue()
            for source in range(ranks)
            for destination in range(ranks)
            if source != destination
        }

    def run(self, work: Callable[[ThreadTransport], Result]) -> list[Result]:
        """Call `work` with each rank's transport, in a thread per rank; return the results.

        Raises:
            Exception: what `work` raised on the lowest rank on which it raised.
        """
        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(work, ThreadTransport(self, r)) for r in range(self.ranks)]
        return [future.result() for future in futures]


class ThreadTransport:
    """One rank's side of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        """Be `rank` of `group`."""
        self.rank = rank
        self.ranks = group.ranks
        self._boxes = group.boxes
        self._clock = SystemClock()

    def exchange(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        timeout_s: float,
    ) -> None:
        """Start all messages, and return when all of them have ended; see `Transport`."""
        deadline_s = self._clock.now_s() + timeout_s
        posted = []
        for peer, array in sends:
            letter = _Letter(array, threading.Event())
            self._boxes[self.rank, peer].put(letter)
            posted.append((peer, letter))
        for peer, array in receives:
            try:
                remaining_s = max(deadline_s - self._clock.now_s(), 0.0)
                letter = self._boxes[peer, self.rank].get(timeout=remaining_s)
            except queue.Empty:
                raise _late(self.rank, f"rank {peer} did not send", timeout_s) from None
            array[:] = letter.array
            letter.copied.set()
        for peer, letter in posted:
            if not letter.copied.wait(max(deadline_s - self._clock.now_s(), 0.0)):
                raise _late(self.rank, f"rank {peer} did not receive", timeout_s)


def _late(rank: int, what: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{what} within {timeout_s:.3g} s",
        where=f"rank {rank}",
        fix="See what that rank does, or allow more time",
    )
