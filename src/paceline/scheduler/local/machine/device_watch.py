"""Looks at the machine's devices again and again while they are served: some may be lost.

CPU slots      a core that this process may not use any more (a cpuset that shrank)
NVIDIA GPUs    one that nvidia-smi does not list any more; all, when it fails time after time

nvidia-smi may hang for long when a driver is in trouble, so it runs beside the daemon, which looks
at it when it has ended, and kills it after `DEADLINE_S`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.affinity import allowed_cores
from paceline.core.errors import Missing
from paceline.scheduler.local.jobs.devices import GPU_QUERY, gpus_of
from paceline.scheduler.local.queue.turns import DevicesSeen

if TYPE_CHECKING:
    from paceline.scheduler.local.jobs.devices import LocalDevices

CHECK_S = 15.0
DEADLINE_S = 20.0
_END_S = 1.0  # for a killed query, when the daemon ends
_FAILURES = 3  # queries in a row that fail before all GPUs count as lost


class _Query(NamedTuple):
    """A running nvidia-smi."""

    child: subprocess.Popen[bytes]
    process: int
    deadline_s: float


class DeviceWatch:
    """What is there of the devices of a queue; use it from the daemon's thread.

    Attributes:
        begun: number of looks that have begun.
    """

    def __init__(
        self,
        devices: LocalDevices,
        selector: selectors.BaseSelector,
        *,
        check_s: float = CHECK_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Begin with all devices there.

        Args:
            devices: that are served.
            selector: tells the caller when to call `read`, by keys with this watch as their data.
            check_s: between two looks.
            deadline_s: of one.
        """
        self._devices = devices
        self._selector = selector
        self._check_s = check_s
        self._deadline_s = deadline_s
        self._query: _Query | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        self._failures = 0
        self._next_s = float("-inf")
        self.begun = 0

    @property
    def wake_s(self) -> float:
        """When to call `look`."""
        return self._next_s if self._query is None else self._query.deadline_s

    @property
    def exits_tell(self) -> bool:
        """Whether a job that fails may have lost a device a moment ago."""
        return bool(self._devices.gpus)

    def hurry(self) -> None:
        """Let the next look be due now."""
        self._next_s = float("-inf")

    def look(self, now_s: float) -> DevicesSeen | None:
        """Look at the devices if it is time; return what there is, if that is known at once."""
        if self._query is not None:
            return self._give_up() if now_s >= self._query.deadline_s else None
        if now_s < self._next_s:
            return None
        self._next_s = now_s + self._check_s
        self.begun += 1
        self._killed = [child for child in self._killed if child.poll() is None]
        if not self._devices.gpus:
            return self._cores()
        try:
            self._query = self._start(now_s + self._deadline_s)
        except OSError as problem:
            return self._failed(str(problem))
        self._selector.register(self._query.process, selectors.EVENT_READ, self)
        return None

    def read(self) -> DevicesSeen | None:
        """Return what there is, after the query has ended; None if it said nothing of use."""
        query = self._forget()
        if query is None:
            return None
        query.child.wait()  # it has ended
        assert query.child.stdout is not None
        with query.child.stdout as pipe:
            os.set_blocking(pipe.fileno(), False)  # another process may hold the other end
            text = (pipe.read() or b"").decode(errors="replace")
        if query.child.returncode:
            return self._failed(text.strip() or f"exit code {query.child.returncode}")
        try:
            listed = set(gpus_of(text).gpus)
        except Missing:
            listed = set()
        except ValueError:  # not a list of GPUs
            return self._failed(text.strip())
        self._failures = 0
        present = [index for index, gpu in enumerate(self._devices.gpus) if gpu in listed]
        return DevicesSeen(frozenset(present), "nvidia-smi does not list it any more")

    def close(self) -> None:
        """End a query that runs."""
        if query := self._forget():
            self._kill(query.child)
        for child in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)

    def _start(self, deadline_s: float) -> _Query:
        child = subprocess.Popen(
            GPU_QUERY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return _Query(child, os.pidfd_open(child.pid), deadline_s)
        except OSError:
            self._kill(child)
            raise

    def _cores(self) -> DevicesSeen:
        allowed = set(allowed_cores())
        present = [index for index, core in enumerate(self._devices.cores) if core in allowed]
        return DevicesSeen(frozenset(present), "its core may not be used any more")

    def _give_up(self) -> DevicesSeen | None:
        query = self._forget()
        assert query is not None
        self._kill(query.child)
        return self._failed(f"it did not end within {self._deadline_s:g} s")

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        """Kill a query; it is not waited for: while it waits for a driver, it does not end."""
        child.kill()
        if child.stdout is not None:
            child.stdout.close()
        self._killed.append(child)

    def _failed(self, why: str) -> DevicesSeen | None:
        self._failures += 1
        if self._failures < _FAILURES:
            return None
        first = why.partition("\n")[0]
        return DevicesSeen(frozenset(), f"nvidia-smi failed {self._failures} times: {first}")

    def _forget(self) -> _Query | None:
        query, self._query = self._query, None
        if query is not None:
            self._selector.unregister(query.process)
            os.close(query.process)
        return query
