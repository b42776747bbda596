"""Watches the ranks of a run through the headers of their traces."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from paceline.launch.summary import trace_statuses

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.core.clock import Clock
    from paceline.trace.format.header import Status


class StatusWatcher:
    """Reads the ranks' live status while they run, and passes it to a callback."""

    def __init__(
        self,
        run: Path,
        clock: Clock,
        on_status: Callable[[list[Status]], None] | None,
    ) -> None:
        self.run = run
        self.clock = clock
        self.on_status = on_status
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="paceline-watch", daemon=True)

    def __enter__(self) -> None:
        if self.on_status:
            self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.on_status:
            self.thread.join()

    def _watch(self) -> None:
        assert self.on_status is not None
        while not self.clock.wait(self.ended, 0.25):
            self.on_status(trace_statuses(self.run))
        self.on_status(trace_statuses(self.run))
