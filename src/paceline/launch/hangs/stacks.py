"""The stacks of the ranks, while they hang.

    py-spy            if it is installed and may look: it needs nothing of the rank, stopped or not
    a signal          that the rank answers by writing its stack to memory that it offers: Python's
                      faulthandler (`launch.startup`), or in other MPI programs the collector's own
                      handler (native/mpi/recording.cpp). Both work while the rank is blocked
    /proc             where it is in the kernel, for all that do not answer

The memory is an anonymous file of the rank, which is read through ``/proc/PID/fd``: nothing lies in
a folder, and a process without it never gets the signal, which would end it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.processes import stat_fields
from paceline.launch.hangs.signs import kernel_place
from paceline.launch.startup.sitecustomize import STACKS_NAME, stacks_signal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.clock import Clock

_ANSWER_S = 1.0  # a handler answers within milliseconds, if its thread gets a core
_PY_SPY_S = 5.0
_POLL_S = 0.01
_PYTHON_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_PY_SPY_FRAME = re.compile(r"^    (?P<name>.*) \((?P<file>.*?)(:(?P<line>\d+))?\)$")
_NATIVE_FRAME = re.compile(r"^(?P<file>[^(]+)\((?P<name>[^+)]*)\+(?P<offset>0x[0-9a-f]+)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """A thread of a process of this node."""

    process: int
    thread: int


def stacks_of(threads: Mapping[int, Thread], clock: Clock) -> dict[int, tuple[str, ...]]:
    """Return the stack of each rank's main thread, by rank: lines, the innermost first.

    A stopped process that must answer a signal is continued for it.

    Args:
        threads: the main thread of each rank of this node.
        clock: for the wait for answers.
    """
    stacks: dict[int, tuple[str, ...]] = {}
    for rank, thread in threads.items():
        stacks[rank] = _py_spy(thread.process)
    asked = {
        rank: (thread, memory, memory.stat().st_size)
        for rank, thread in threads.items()
        if not stacks[rank] and (memory := _memory_of(thread.process)) is not None
    }
    for thread, _, _ in asked.values():
        with contextlib.suppress(OSError):
            stopped = stat_fields(thread.process)[0] == b"T"
            os.kill(thread.process, stacks_signal())
            if stopped:
                os.kill(thread.process, signal.SIGCONT)
    deadline_s = clock.now_s() + _ANSWER_S
    never = threading.Event()
    so_far = dict.fromkeys(asked, "")
    while asked:
        clock.wait(never, _POLL_S)
        late = clock.now_s() >= deadline_s
        for rank, (_, memory, size) in list(asked.items()):
            text = _written(memory, size)
            if late or (text and text == so_far[rank]):  # nothing was added since the last look
                stacks[rank] = _frames(text)
                del asked[rank]
            so_far[rank] = text
    for rank, thread in threads.items():
        if not stacks[rank]:
            stacks[rank] = kernel_place(thread.process, thread.thread)
    return stacks


def _py_spy(process: int) -> tuple[str, ...]:
    """Return the stack as py-spy sees it; empty if it is not installed or may not look."""
    program = shutil.which("py-spy")
    if program is None:
        return ()
    command = [program, "dump", "--nonblocking", "--pid", str(process)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PY_SPY_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    frames: list[str] = []
    is_main = False
    for line in done.stdout.splitlines():
        if line.startswith("Thread "):
            is_main = '"MainThread"' in line
        elif is_main and (found := _PY_SPY_FRAME.match(line)):
            frames.append(_frame_words(found["file"], found["line"] or "", found["name"]))
    return tuple(frames)


def _memory_of(process: int) -> Path | None:
    """Return the file that a process offers for its stacks; None if it offers none."""
    with contextlib.suppress(OSError):
        for path in (Path("/proc") / str(process) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(STACKS_NAME):
                    return path
    return None


def _written(memory: Path, size: int) -> str:
    """Return what was written beyond `size` so far."""
    try:
        return memory.read_bytes()[size:].decode("utf-8", "replace")
    except OSError:  # the process has ended
        return ""


def _frames(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread in what a handler wrote.

    Python writes its threads from the newest to the oldest, which is the main one; another program
    writes one stack.
    """
    blocks = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    python = [
        _frame_words(found["file"], found["line"], found["name"])
        for line in blocks[-1].splitlines()
        if (found := _PYTHON_FRAME.match(line))
    ]
    return tuple(python) or tuple(_native_words(line) for line in text.splitlines()[2:])


def _native_words(line: str) -> str:
    """Return a frame of ``backtrace_symbols`` in words."""
    found = _NATIVE_FRAME.match(line)
    if found is None:
        return line
    name = found["name"] or _symbol(found["file"], found["offset"])
    return f"{name or found['offset']} ({Path(found['file']).name})"


def _symbol(file: str, offset: str) -> str:
    """Return the function at an offset of a program, as addr2line of binutils finds it."""
    program = shutil.which("addr2line")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "-f", "-e", file, offset],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].replace("??", "")


def _frame_words(file: str, line: str, name: str) -> str:
    return f"{name} ({file}:{line})" if line else f"{name} ({file})"
