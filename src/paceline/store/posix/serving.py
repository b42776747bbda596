"""Keeps a mount by FUSE until a signal, an unmount, or the end of its program."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from typing import TYPE_CHECKING, Self

from paceline.core.errors import NotFound, UsageError
from paceline.store.posix.fuse import FuseMount

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType

    from paceline.store.posix.mounts import PackMount

GRACE_S = 10.0


class StopSignals:
    """Catches the signals that end a program, so that a mount is not left behind.

    They can be read from a descriptor: none interrupts what is under way.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self) -> Self:
        self.descriptor, self._end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._ignore) for number in self._NUMBERS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.descriptor)
        os.close(self._end)

    def take(self) -> list[int]:
        """Return the signals that came since the last call."""
        try:
            found = os.read(self.descriptor, 512)
        except BlockingIOError:
            return []
        return [number for number in found if number in self._NUMBERS]

    @staticmethod
    def _ignore(number: int, frame: FrameType | None) -> None:
        """Python's own handler has written the number to the pipe."""


def serve_mount(
    mount: PackMount,
    program: Sequence[str] = (),
    *,
    threads: int,
    on_ready: Callable[[FuseMount], None],
    tell: Callable[[str], None],
) -> int:
    """Mount a pack until a signal comes, it is unmounted, or `program` ends.

    Args:
        mount: the pack, and an empty folder.
        program: with its arguments; it is started once the pack is mounted.
        threads: that serve the kernel.
        on_ready: called once the pack is mounted.
        tell: takes a line about what is not as usual.

    Returns:
        The exit code of the program, 128 more than the signal that ended it; else 0.

    Raises:
        PacelineError: as FuseMount; or the program cannot be started.
    """
    with StopSignals() as signals:
        fuse = FuseMount(mount, threads=threads, tell=tell)
        try:
            on_ready(fuse)
            code = _run(fuse, signals, program) if program else _wait(fuse, signals)
        finally:
            signals.take()
            fuse.close(grace_s=GRACE_S, hurry=signals.descriptor)
    return code


def _wait(fuse: FuseMount, signals: StopSignals) -> int:
    poller = _poller(signals.descriptor, fuse.ended)
    poller.poll()
    return 0


def _run(fuse: FuseMount, signals: StopSignals, program: Sequence[str]) -> int:
    child = _start(program)
    descriptor = os.pidfd_open(child.pid)
    try:
        # The program goes on if the mount is taken away: it may not need it any more.
        poller = _poller(signals.descriptor, descriptor)
        while child.poll() is None:
            poller.poll()
            for number in signals.take():
                if number != signal.SIGINT:  # Ctrl-C has reached it as well
                    child.send_signal(number)
    finally:
        os.close(descriptor)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _start(program: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(program)
    except FileNotFoundError:
        raise NotFound(
            f"no program {program[0]!r}", fix="Give its path, or a name that is on PATH"
        ) from None
    except OSError as problem:
        raise UsageError(
            "the program cannot be started",
            where=program[0],
            why=problem.strerror or "",
            fix="Check that it is a program for this machine, and that you may execute it",
        ) from None


def _poller(*descriptors: int) -> select.poll:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return poller
