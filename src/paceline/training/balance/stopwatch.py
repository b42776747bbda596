"""How long this rank is busy in each step, without waiting for other ranks.

::

    optimizer.step   the rest of it, data, forward, backward, all gradients computed   averaging
    |<-------------------------- busy --------------------------->|                    |
    before the step of the optimizer ...                                      ... and the next one

A step of the optimizer begins when the gradients of all ranks have arrived: what ends there is a
wait, and what begins there is the rank's own. On a GPU, whose work the host only queues, events on
its stream mark the two times. What a rank waits in the forward pass for buffers of rank 0 (batch
normalisation under DistributedDataParallel) is taken off.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEDSTAT = "/proc/thread-self/schedstat"
_SCHEDSTAT_BYTES = 128  # more than its three numbers have
_STEPS_MAX = 64  # kept while no window ends, as in a loop that steps the optimizer alone


class HostTimes(NamedTuple):
    """Seconds of the main thread so far: on a core, and ready without one."""

    running_s: float
    not_running_s: float


class ThreadClock:
    """Reads the times of the thread that makes it; where the kernel counts none, running alone.

    The file stays open to the end of the process, as a rank has one clock: opening it takes longer
    than reading it.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> HostTimes:
        """Return the times so far."""
        if self._descriptor is None:
            return HostTimes(time.thread_time(), 0.0)
        try:
            times = os.pread(self._descriptor, _SCHEDSTAT_BYTES, 0)
            running_ns, not_running_ns = times.split()[:2]
        except (OSError, ValueError):  # a script may close what it did not open, as daemons do
            return HostTimes(time.thread_time(), 0.0)
        return HostTimes(int(running_ns) / 1e9, int(not_running_ns) / 1e9)


class HostMark:
    """A time on the host."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def since(self, earlier: HostMark) -> float | None:
        """Return the seconds since an earlier mark."""
        return self.at_s - earlier.at_s


class DeviceMark:
    """A time on the current stream of a GPU, known once its work has come so far."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def since(self, earlier: DeviceMark) -> float | None:
        """Return the seconds since an earlier mark; None as long as the GPU has not come here."""
        if not self.event.query():
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _TimedStep(NamedTuple):
    """A measured step: its marks, its batches, its time on the host, and what is taken off."""

    begin: Any
    ready: Any
    batches: int
    step_s: float
    waited_s: float


class BusyTimes(NamedTuple):
    """The figures of a window; see `controller.RankWindow`."""

    steps: int
    busy_s: float
    spread_s: float
    step_s: float
    data_s: float
    running_s: float
    not_running_s: float


class Stopwatch:
    """The times of this rank's steps since the last `restart`; used by the main thread.

    Args:
        make_mark: HostMark or DeviceMark, or what stands for them in a test.
        host: returns `HostTimes`; a `ThreadClock` by default.
    """

    def __init__(
        self,
        make_mark: Callable[[], Any] = HostMark,
        host: Callable[[], HostTimes] | None = None,
    ) -> None:
        self.make_mark = make_mark
        self._host = host or ThreadClock()
        self._begin: Any = None
        self._ready: Any = None
        self._begin_host = HostMark()
        self._waited_s = 0.0
        self._batches = 0
        self._steps: list[_TimedStep] = []
        self._data_s = 0.0
        self._all_batches = 0
        self._since = self._host()

    def got_batch(self, waited_s: float) -> None:
        """Note a batch, and how long the loop waited for it."""
        self._batches += 1
        self._all_batches += 1
        self._data_s += waited_s

    def gradients_ready(self) -> None:
        """Note that the gradients of a backward pass are computed."""
        self._ready = self.make_mark()

    def waited(self, seconds: float) -> None:
        """Note a wait for another rank before the gradients are there."""
        self._waited_s += seconds

    def before_optimizer(self) -> None:
        """Note that the averaged gradients are there, and a step of an optimizer begins."""
        now = HostMark()
        if self._ready is None:  # the second optimizer of a step
            return
        if self._begin is not None and self._batches:
            step_s = now.since(self._begin_host) or 0.0
            step = _TimedStep(self._begin, self._ready, self._batches, step_s, self._waited_s)
            self._steps.append(step)
            del self._steps[:-_STEPS_MAX]
        self._begin, self._ready, self._begin_host = self.make_mark(), None, now
        self._batches, self._waited_s = 0, 0.0

    def measured(self) -> BusyTimes:
        """Return the figures of the steps since the last restart, per batch."""
        busy, whole = [], []
        for step in self._steps:
            seconds = step.ready.since(step.begin)
            if seconds is not None:
                busy.append(max(0.0, seconds - step.waited_s) / step.batches)
                whole.append(step.step_s / step.batches)
        now, batches = self._host(), max(1, self._all_batches)
        if not busy:
            return BusyTimes(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        middle_s = statistics.median(busy)
        return BusyTimes(
            steps=len(busy),
            busy_s=middle_s,
            spread_s=statistics.median(abs(value - middle_s) for value in busy),
            step_s=statistics.median(whole),
            data_s=self._data_s / batches,
            running_s=(now.running_s - self._since.running_s) / batches,
            not_running_s=(now.not_running_s - self._since.not_running_s) / batches,
        )

    def restart(self) -> None:
        """Begin a window; a step that has begun belongs to it."""
        self._steps.clear()
        self._data_s, self._all_batches = 0.0, 0
        self._since = self._host()
