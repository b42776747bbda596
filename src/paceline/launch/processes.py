"""Leaves nothing running: finds and ends whatever the ranks of a run started.

The launcher makes itself the reaper of its descendants, so that a loader worker whose rank was
killed becomes its own child instead of init's, and can be ended with the run. The keepers of shared
memory that torch and Python start beside it end last, and by themselves: they remove what the
killed ones left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.clock import Clock

_PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0  # from a stop signal to SIGKILL; a rank blocked in a collective cannot answer
_KEEPERS_S = 3.0  # torch's keeper of shared memory ends 2 s after the last process that uses it


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a rank's process ended; `signal` is empty unless one killed it."""

    rank: int
    code: int
    signal: str = ""


def become_reaper() -> None:
    """Adopt descendants whose parents die."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, parents before children."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found.extend(frontier)
    return found


def end_descendants(clock: Clock, before: frozenset[int] = frozenset()) -> None:
    """Kill and reap every descendant of this process but those in `before` and their own."""
    spared = before.union(*(descendants(pid) for pid in before))
    patience_s = clock.now_s() + _KEEPERS_S
    never = threading.Event()
    while left := [pid for pid in descendants(os.getpid()) if pid not in spared]:
        for pid in left:
            if clock.now_s() >= patience_s or not _keeps_shared_memory(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if clock.now_s() >= patience_s + GRACE_S:  # stuck in the kernel, where no signal reaches
            return
        clock.wait(never, 0.005)


def _keeps_shared_memory(pid: int) -> bool:
    """Whether a process waits for others to end, in order to remove what they shared."""
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
    return b"torch_shm_manager" in command or b"multiprocessing.resource_tracker" in command


@contextlib.contextmanager
def ended_on_signal(clock: Clock) -> Iterator[None]:
    """Within it, a stop signal kills what is left of the descendants after `GRACE_S`.

    The agent asks ranks to stop and waits half a minute for them; one that is blocked in a
    collective will not answer. Signals are seen through the wake-up descriptor, because the agent
    takes the handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not reach other threads; neither do they stop the agent there
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    done = threading.Event()
    stop_signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}

    def watch() -> None:
        while not done.is_set():
            seen = os.read(reader, 1)
            if not seen or seen[0] not in stop_signals:
                continue
            if not clock.wait(done, GRACE_S):
                for pid in descendants(os.getpid()):
                    if not _keeps_shared_memory(pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            return

    watcher = threading.Thread(target=watch, name="paceline-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the watcher's read
        watcher.join()
        os.close(reader)


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        yield int(folder.name), int(text.rpartition(")")[2].split()[1])
