"""Finds the child process whose death is the reason for a rank's exception.

What a rank raises when a worker of its loader is killed depends on the moment: torch's own error, a
broken connection, or whatever a signal handler interrupts. The exit status of the child says it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.connection
import multiprocessing.process
import os
import re
import signal
import sys
import traceback
from typing import Any, NamedTuple

from paceline.core.node import oom_kills
from paceline.core.processes import signal_name

LOADER_WORKER = "a loader worker"
# Raised by calls that talk to a process that has gone.
_OF_A_LOST_CHILD = re.compile(
    r"DataLoader worker|BrokenProcessPool|ConnectionResetError|ConnectionRefusedError|EOFError"
    r"|BrokenPipeError|terminated abruptly|exited unexpectedly"
)
# Of a worker whose loader has gone by now, torch's message alone is left.
_TORCH_SAYS = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: (?P<what>[^.]*)")
_BY_ITS_PARENT = (signal.SIGTERM, signal.SIGINT)
_ENDS_S = 2.0  # after its connections have closed, until a process can be asked how it ended
_KILLS_BEFORE = oom_kills()  # in this process's control group, when it began to be watched


class LostChild(NamedTuple):
    """A child process that ended badly.

    Attributes:
        name: what it is: ``a loader worker``, or its process's name.
        signal: that ended it; empty where it exited.
        code: its exit code, where it exited.
        by_oom: whether the control group's OOM killer has killed a process since.
    """

    name: str
    signal: str
    code: int
    by_oom: bool


def lost_child(error: BaseException) -> LostChild | None:
    """Return the child whose death explains what this process raised; None if there is none.

    A child that exited with a code, or that its parent ended, explains only an error that is about
    a process that has gone.
    """
    is_about_it = bool(_OF_A_LOST_CHILD.search(f"{type(error).__name__}: {error}"))
    children = _children()
    if is_about_it and children and not any(child.exitcode for child in children):
        _wait_for_an_end([child.pid for child in children])
    ended = [(child, code) for child in children if (code := child.exitcode)]
    killed = [entry for entry in ended if entry[1] < 0 and -entry[1] not in _BY_ITS_PARENT]
    for child, code in killed or (ended if is_about_it else []):
        is_worker = _is_loader_worker(child) or _is_of_a_loader(error)
        name = LOADER_WORKER if is_worker else f"process {child.name}"
        return _lost(name, -code if code < 0 else 0, code)
    said = _TORCH_SAYS.search(str(error))
    number = _signal_called(said["what"]) if said else 0
    return _lost(LOADER_WORKER, number, 0) if number else None


def _lost(name: str, number: int, code: int) -> LostChild:
    return LostChild(
        name=name,
        signal=signal_name(number) if number else "",
        code=max(code, 0),
        by_oom=number == signal.SIGKILL and oom_kills() > _KILLS_BEFORE,
    )


def _children() -> list[Any]:
    """Return the child processes of Python's multiprocessing, also those that have ended."""
    known: Any = multiprocessing.process._dangling  # type: ignore[attr-defined]  # noqa: SLF001  # no public list has those that ended
    own = os.getpid()
    found = [
        child
        for child in list(known)
        if getattr(child, "_popen", None) is not None and child._parent_pid == own  # noqa: SLF001  # others cannot be asked
    ]
    return sorted(found, key=lambda child: child.pid)


def _wait_for_an_end(processes: list[int]) -> None:
    """Wait until one of this process's children has ended; Python's sentinels tell it too soon."""
    with contextlib.ExitStack() as stack:
        files = []
        for process in processes:
            with contextlib.suppress(OSError):  # one that was waited for
                files.append(os.pidfd_open(process))
                stack.callback(os.close, files[-1])
        multiprocessing.connection.wait(files, _ENDS_S)


def _is_loader_worker(child: Any) -> bool:
    """Return whether a child is a worker of a loader that still exists."""
    module = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(module, "_MultiProcessingDataLoaderIter", None)
    return kind is not None and any(
        child in getattr(found, "_workers", ()) for found in gc.get_objects() if type(found) is kind
    )


def _is_of_a_loader(error: BaseException) -> bool:
    """Return whether an error was raised in torch's loader."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("/torch/utils/data/" in frame.filename for frame in frames)


def _signal_called(what: str) -> int:
    """Return the number of the signal that the C library calls `what`; 0 if there is none."""
    return next((int(n) for n in signal.valid_signals() if signal.strsignal(n) == what), 0)
