"""Time as an argument: the system's clock, and one that tests move by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading


class Clock(Protocol):
    """The clock that is passed to code that waits or measures, in place of the time module."""

    def now_s(self) -> float:
        """Return seconds of a clock that never goes back."""

    def wall_s(self) -> float:
        """Return seconds since 1970, for stamps that people read."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set or `timeout_s` passed; return whether it is set."""


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return seconds since 1970."""
        return time.time()  # noqa: TID251  # this is the seam itself

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for `event`, at most `timeout_s` seconds."""
        return event.wait(timeout_s)


@dataclass
class ManualClock:
    """A clock that stands still until `advance` or a wait moves it."""

    now: float = 0.0
    wall: float = 1_700_000_000.0

    def now_s(self) -> float:
        """Return the seconds that this clock was moved to."""
        return self.now

    def wall_s(self) -> float:
        """Return the wall time that goes with `now_s`."""
        return self.wall + self.now

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Move on by `timeout_s` unless `event` is set already."""
        if not event.is_set():
            self.advance(timeout_s)
        return event.is_set()

    def advance(self, seconds: float) -> None:
        """Move the clock on."""
        assert seconds >= 0
        self.now += seconds
