"""Finds and ends all processes that the ranks of a run started, so that none keeps running.

The launcher makes itself the reaper of its descendants, so that a loader worker whose rank was
killed becomes its own child instead of init's, and can be ended with the run. The resource
trackers that torch and Python start end last, and by themselves: they remove the shared memory
that killed processes left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from paceline.core.clock import Clock

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PREEMPTION_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # save your state and end
GRACE_S = 2.0  # from a stop signal to SIGKILL; a rank blocked in a collective cannot answer
_TRACKERS_S = 3.0  # torch's resource tracker ends 2 s after the last process that uses it


class StopRequested(KeyboardInterrupt):  # not an error: a user or scheduler wants us to end
    """A stop signal came; `signal` is its name."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal = signal_name


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have no name of their own but a number.

    >>> signal_name(9), signal_name(35)
    ('SIGKILL', 'signal 35 (SIGRTMIN+1)')
    """
    first, last = int(signal.SIGRTMIN), int(signal.SIGRTMAX)
    if first <= number <= last:
        offset = f"+{number - first}" if number > first else ""
        return f"signal {number} (SIGRTMIN{offset})"
    try:
        return signal.Signals(number).name
    except ValueError:  # the C library keeps 32 and 33 for itself
        return f"signal {number}"


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when `parent`, who started it, is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it was killed before we asked
        os.kill(os.getpid(), number)


def signal_thread(process: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process, or to the process where the C library cannot.

    Raises:
        OSError: there is no such thread, or it belongs to another user.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "tgkill"):  # glibc has it since 2.30, musl has not
        os.kill(process, number)
    elif library.tgkill(process, thread, number):
        raise OSError(ctypes.get_errno(), f"cannot signal thread {thread} of process {process}")


def become_reaper() -> None:
    """Adopt descendants whose parents die."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, parents before children."""
    return trees([pid])[0]


def trees(pids: Sequence[int]) -> list[list[int]]:
    """Return the processes below each of `pids`, parents before children, of one moment."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = []
    for pid in pids:
        below: list[int] = []
        frontier = [pid]
        while frontier:
            frontier = [child for parent in frontier for child in children.get(parent, [])]
            below.extend(frontier)
        found.append(below)
    return found


def end_descendants(clock: Clock, before: frozenset[int] = frozenset()) -> None:
    """Kill and reap every descendant of this process but those in `before` and their own."""
    patience_s = clock.now_s() + _TRACKERS_S
    never = threading.Event()
    while left := _unspared(before):
        for pid in left:
            if clock.now_s() >= patience_s or not _is_resource_tracker(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if clock.now_s() >= patience_s + GRACE_S:  # stuck in the kernel, where no signal reaches
            return
        clock.wait(never, 0.005)


def _unspared(before: frozenset[int]) -> list[int]:
    found = descendants(os.getpid())  # first: what is spared may start another process meanwhile
    spared = before.union(*(descendants(pid) for pid in before))
    return [pid for pid in found if pid not in spared]


def signal_descendants(number: int) -> None:
    """Send a signal to every descendant of this process but resource trackers."""
    for pid in descendants(os.getpid()):
        if not _is_resource_tracker(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def outlive_preemption() -> None:
    """Have this process survive `PREEMPTION_SIGNALS`: they are for the programs below it.

    Schedulers send them to all processes of a job. They are not ignored, which programs that are
    started would inherit: a handler does nothing, and does not outlive exec.
    """
    for number in PREEMPTION_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda _number, _frame: None)


def ignore_preemption() -> None:
    """Ignore `PREEMPTION_SIGNALS` until the process has ended: its work is done.

    The interpreter removes handlers before it ends, and a signal of that moment would kill the
    process: a job that had succeeded would be started again.
    """
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def is_background_job() -> bool:
    """Whether this process ignores SIGINT in vain, as no terminal could send it a Ctrl-C.

    Shells start background jobs with SIGINT ignored, for the sake of a Ctrl-C in their terminal.
    """
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _is_resource_tracker(pid: int) -> bool:
    """Whether a process waits for others to end, in order to remove their shared memory."""
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"torch_shm_manager" in command or b"multiprocessing.resource_tracker" in command


@contextlib.contextmanager
def ended_on_signal(clock: Clock) -> Iterator[None]:
    """Have the first stop signal raise `StopRequested`, and after `GRACE_S` kill descendants.

    A rank that is blocked in a collective does not answer a stop signal. A thread waits for the
    signal at the wake-up descriptor, so that the deadline also holds where the main thread is in
    native code, in which no handler runs. A signal that we were started to ignore (nohup) stays
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signal handlers run only in the main thread
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    left = threading.Event()
    stopping = threading.Event()

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stopping.is_set():  # a second signal changes nothing: stopping takes seconds
            stopping.set()
            raise StopRequested(signal_name(number))

    handlers = {
        number: signal.signal(number, stop)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }

    def watch() -> None:
        while not left.is_set():
            number = os.read(reader, 1)
            if not number or number[0] not in STOP_SIGNALS:
                continue
            if not clock.wait(left, GRACE_S):
                signal_descendants(signal.SIGKILL)
            return

    watcher = threading.Thread(target=watch, name="paceline-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # Of a handler that Python did not set, a preloaded library's, nothing is known here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the watcher's read
        watcher.join()
        os.close(reader)


def boot_id() -> str:
    """Return what tells this machine since it was started from all others, and from itself before.

    Raises:
        OSError: the kernel does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def started_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if it does not run.

    With `boot_id` it tells the process from others that had its id before or get it later.
    """
    try:
        state, *fields = stat_fields(pid)
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(fields[18])


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of a process from the third on, its state: ``/proc/PID/stat`` of proc(5).

    The second one, its name, may hold any bytes.

    Raises:
        OSError: it has ended.
    """
    text = (Path("/proc") / str(pid) / "stat").read_bytes()
    return text.rpartition(b")")[2].split()


def allow_descriptors(count: int) -> None:
    """Raise this process's soft limit on open files to `count`, or to the hard one if lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def running_processes() -> list[int]:
    """Return the ids of all processes that this one can see."""
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]


def _parents() -> Iterator[tuple[int, int]]:
    for pid in running_processes():
        with contextlib.suppress(OSError):  # it has ended
            yield pid, int(stat_fields(pid)[1])
