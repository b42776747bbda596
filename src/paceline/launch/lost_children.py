"""Finds the child process whose death is the reason for a rank's exception, or for its hang.

What a rank raises when a worker of its loader is killed depends on the moment: torch's own error, a
broken connection, or whatever a signal handler interrupts. The exit status of the child says it.

A `multiprocessing.Pool` puts a new process in the place of a killed one, and waits for the lost
result for ever. Pools forget their processes: the exit status is noted where they ask for it, and
for the launcher in ``trace/rank-00000.lost``, beside the rank's trace.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import multiprocessing.connection
import multiprocessing.process
import os
import re
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import StorageError
from paceline.core.files import commit_text
from paceline.core.node import oom_kills
from paceline.core.on_import import on_import
from paceline.core.processes import signal_name

if TYPE_CHECKING:
    from pathlib import Path

_LOG = logging.getLogger(__name__)

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
_POPEN_MODULES = ("multiprocessing.popen_fork", "multiprocessing.popen_forkserver")
_noted: list[LostChild] = []  # by the thread that asked how its process ended
_notes: dict[int, Path] = {}  # where this process notes them, by its number


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


def note_lost_children(run: Path, rank: int) -> None:
    """Note from now on which processes of multiprocessing, started by this one, are killed.

    Args:
        run: folder of the run.
        rank: the global rank of this process.
    """
    _notes.clear()
    _notes[os.getpid()] = run / "trace" / f"rank-{rank:05d}.lost"
    for name in _POPEN_MODULES:
        on_import(name, _ask_through)


def read_lost_child(run: Path, rank: int) -> LostChild | None:
    """Return the last process of a rank that was killed; None if none was."""
    try:
        text = (run / "trace" / f"rank-{rank:05d}.lost").read_text("utf-8")
        return LostChild(**json.loads(text))
    except (OSError, ValueError, TypeError):  # cut short by a full disk
        return None


def _ask_through(module: Any) -> None:
    """Have a kind of process noted where its exit status is asked for."""
    popen = module.Popen
    if "_paceline_ended" in vars(popen):  # for an earlier run of this process
        return
    poll, send = popen.poll, popen._send_signal  # noqa: SLF001  # terminate() and kill() call it

    def noting(self: Any, *args: Any, **named: Any) -> Any:
        known = self.returncode
        code = poll(self, *args, **named)
        if known is None and code is not None and not self._paceline_ended:
            _note(self, code)
        return code

    def marking(self: Any, sig: int) -> None:
        self._paceline_ended = True
        send(self, sig)

    popen._paceline_ended = False  # noqa: SLF001  # ours
    popen.poll, popen._send_signal = noting, marking  # noqa: SLF001  # as above


def _note(popen: Any, code: int) -> None:
    """Note a process that was killed by another than its parent."""
    path = _notes.get(os.getpid())  # none in a forked child
    if path is None or code >= 0 or -code in _BY_ITS_PARENT:
        return
    own = (child for child in _children() if child._popen is popen)  # noqa: SLF001  # nothing else knows it
    lost = _lost(_name_of(next(own, None)), -code, code)
    _noted.append(lost)
    _LOG.warning("%s was killed by %s", lost.name, lost.signal)
    with contextlib.suppress(StorageError):  # a full disk
        commit_text(path, json.dumps(lost._asdict()))


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
    if is_about_it and _noted and not killed:
        return _noted[-1]._replace(name=LOADER_WORKER) if _is_of_a_loader(error) else _noted[-1]
    for child, code in killed or (ended if is_about_it else []):
        name = LOADER_WORKER if _is_of_a_loader(error) else _name_of(child)
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


def _name_of(child: Any) -> str:
    if child is None:
        return "a process"
    return LOADER_WORKER if _is_loader_worker(child) else f"process {child.name}"


def _is_loader_worker(child: Any) -> bool:
    """Return whether a child is a worker of a loader that still exists."""
    module = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(module, "_MultiProcessingDataLoaderIter", None)
    return kind is not None and any(
        child in getattr(found, "_workers", ()) for found in gc.get_objects() if type(found) is kind
    )


def _is_of_a_loader(error: BaseException) -> bool:
    """Return whether an error is of torch's loader: raised there, or by its handler of signals."""
    if _TORCH_SAYS.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any("/torch/utils/data/" in frame.filename for frame in frames)


def _signal_called(what: str) -> int:
    """Return the number of the signal that the C library calls `what`; 0 if there is none."""
    return next((int(n) for n in signal.valid_signals() if signal.strsignal(n) == what), 0)
