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
from typing import TYPE_CHECKING, BinaryIO

from paceline.core.processes import signal_thread, stat_fields
from paceline.launch.hangs.signs import kernel_place
from paceline.launch.startup.sitecustomize import STACKS_NAME, stacks_signal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.clock import Clock

_ANSWER_S = 1.0  # a handler answers within milliseconds, if its thread gets a core
_PY_SPY_S = 5.0
_POLL_S = 0.01
_FUNCTION_BYTES = 1 << 14
_PYTHON_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_BOOTSTRAP = re.compile(r"_bootstrap \(.*multiprocessing/process\.py")
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
    stacks = {rank: _py_spy(thread.process) for rank, thread in threads.items()}
    asked = {rank: thread for rank, thread in threads.items() if not stacks[rank]}
    stopped = {rank for rank, thread in asked.items() if _is_stopped(thread.process)}
    # Those that are stopped come last: as they go on, the others may, too.
    for ranks in (asked.keys() - stopped, stopped):
        stacks.update(_answers({rank: asked[rank] for rank in ranks}, clock))
    for rank, thread in threads.items():
        if not stacks[rank]:
            stacks[rank] = kernel_place(thread.process, thread.thread)
    return stacks


def since_fork(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return the frames of a process that Python's multiprocessing forked, without its parent's."""
    ends = [place for place, frame in enumerate(stack) if _BOOTSTRAP.match(frame)]
    return stack[: ends[0]] if ends else stack


def answers(process: int) -> bool:
    """Return whether a process offers memory for its stack."""
    memory = _memory_of(process)
    if memory is None:
        return False
    memory.close()
    return True


def _answers(threads: Mapping[int, Thread], clock: Clock) -> dict[int, tuple[str, ...]]:
    """Return the stacks that processes answer a signal with, by rank; empty without an answer."""
    stacks: dict[int, tuple[str, ...]] = dict.fromkeys(threads, ())
    with contextlib.ExitStack() as stack:
        memories = {}
        for rank, thread in threads.items():
            memory = _memory_of(thread.process)
            if memory is not None:
                memories[rank] = stack.enter_context(memory)  # it may end once it goes on
        sizes = {rank: len(_written(memory, 0)) for rank, memory in memories.items()}
        for rank in memories:
            _ask(threads[rank])
        so_far = dict.fromkeys(memories, "")
        deadline_s = clock.now_s() + _ANSWER_S
        never = threading.Event()
        while memories:
            late = clock.wait(never, _POLL_S) or clock.now_s() >= deadline_s
            for rank, memory in list(memories.items()):
                text = _written(memory, sizes[rank])
                if late or (text and text == so_far[rank]):  # nothing was added since the last look
                    stacks[rank] = _frames(text)
                    del memories[rank]
                so_far[rank] = text
    return stacks


def _ask(thread: Thread) -> None:
    """Send the signal for a stack, and continue a stopped process so that it gets it.

    The main thread gets it, and answers before it goes on: a signal to a process that is stopped
    is taken by whichever thread wakes first, when the main one may have left its place.
    """
    with contextlib.suppress(OSError):
        signal_thread(thread.process, thread.thread, stacks_signal())
        if _is_stopped(thread.process):
            os.kill(thread.process, signal.SIGCONT)


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):
        return stat_fields(process)[0] == b"T"
    return False


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


def _memory_of(process: int) -> BinaryIO | None:
    """Return the memory that a process offers for its stacks; None if it offers none."""
    with contextlib.suppress(OSError):
        for path in (Path("/proc") / str(process) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(STACKS_NAME):
                    return path.open("rb")
    return None


def _written(memory: BinaryIO, size: int) -> str:
    """Return what was written beyond `size` so far."""
    memory.seek(size)
    return memory.read().decode("utf-8", "replace")


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
    """Return a frame of ``backtrace_symbols`` in words.

    It names the nearest exported function, which is another one where the offset is large.
    """
    found = _NATIVE_FRAME.match(line)
    if found is None:
        return line
    if found["name"] and int(found["offset"], 16) <= _FUNCTION_BYTES:
        return f"{found['name']} ({Path(found['file']).name})"
    if ".so" in Path(found["file"]).name:
        return f"? ({Path(found['file']).name})"
    name, _, place = _symbol(found["file"], found["offset"]).partition("\n")
    place = place.strip().partition(" (")[0]
    known = bool(place) and not place.startswith("?")
    return f"{name or found['offset']} ({place if known else Path(found['file']).name})"


def _symbol(file: str, offset: str) -> str:
    """Return function, and in a second line file and line, at an offset of a program.

    As addr2line of binutils finds them; empty without it.
    """
    program = shutil.which("addr2line")
    if program is None:
        return ""
    command = [program, "-f", "-e", file, offset]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PY_SPY_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.replace("??", "?")


def _frame_words(file: str, line: str, name: str) -> str:
    return f"{name} ({file}:{line})" if line else f"{name} ({file})"
