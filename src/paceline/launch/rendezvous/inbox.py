"""Events from other threads to the one that owns a state machine and waits at descriptors."""

from __future__ import annotations

import contextlib
import queue
import socket
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

E = TypeVar("E")


class Inbox(Generic[E]):
    """Events for one thread: any thread may `put`, the owner alone calls the other methods.

    Its descriptor is readable while events may be there, for a selector or a poll.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[E] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def put(self, event: E) -> None:
        """Hand an event to the owner."""
        self._events.put(event)
        with contextlib.suppress(OSError):  # full, which wakes the owner too, or closed
            self._writer.send(b"\0")

    def take(self) -> Iterator[E]:
        """Yield the events that have come, and those that come meanwhile."""
        with contextlib.suppress(BlockingIOError):  # before the events: none comes unnoticed
            self._reader.recv(4096)
        while not self._events.empty():
            yield self._events.get_nowait()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._reader.fileno()

    def close(self) -> None:
        """Give the descriptors back."""
        self._reader.close()
        self._writer.close()
