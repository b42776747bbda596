"""Runs the calls of one group one after the other, so that the main thread can go on computing.

Between hosts a call waits for the wire, not for a core: there a thread hides its time.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from paceline.collectives.works import PendingWork

if TYPE_CHECKING:
    from collections.abc import Callable

_CLOSE_S = 5.0


class CommunicationThread:
    """A thread with a queue of calls; any thread may add one, and the order stays.

    It is a daemon: a script that ends amid a call is not held up by it.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[PendingWork, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, result: list[Any], call: Callable[[], None]) -> PendingWork:
        """Have `call` run after all calls before it; return its work, which holds `result`."""
        work = PendingWork(result)
        self._calls.put((work, call))
        return work

    def close(self) -> None:
        """End the thread after the calls that it has, and wait a moment for that."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            work, call = entry
            work.run(call)
            del entry, work, call  # the tensors of a call that is over are not kept until the next
