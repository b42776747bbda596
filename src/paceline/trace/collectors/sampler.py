"""Samples what the main thread executes between phases, where no hook knows.

A thread of its own wakes a few times a second. In a phase it goes back to sleep; between phases it
records the name of what the main thread executes: the function of the innermost frame that is
neither the standard library's nor torch's, or the line if that is in the script. `analysis.host`
turns samples to time.

While the main thread executes Python code, this thread cannot: it gets the GIL when the main thread
blocks, or 5 ms after it asks for it, and short Python work would never be seen. So a sample is of
the moment at which the thread was to wake. If it comes later than that, what was executed then is
known only if the main thread is between the same two phases still.

The thread is started below `threading`, so that the script's own view of its threads stays as it
is. Cost: see bench/LOG.md.
"""

from __future__ import annotations

import _thread
import math
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.native import monotonic_ns
from paceline.trace.collectors.torch_hooks import RecordedKind
from paceline.trace.format.events import IDLE, MAIN, PYTHON_CODE, Kind

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from paceline.native import Recorder
    from paceline.trace.collectors.torch_hooks import Loop

# The first samples name what a short run does, later ones only refine the shares.
FIRST_INTERVAL_S, INTERVAL_S, FIRST_COUNT = 0.01, 0.05, 300
NAMES_MAX = 1000
_HELD_NS = 200_000  # a timer on a free core comes sooner: who comes later waited for the GIL
_GOLDEN = (math.sqrt(5) - 1) / 2  # intervals vary by it, lest they keep pace with the steps
_PASSED_OVER = (
    "<frozen",
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",  # and not torchvision beside it
)
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


class StackSampler:
    """Samples the main thread's stack; `start` and `stop` are called by the main thread."""

    def __init__(self, recorder: Recorder, loop: Loop) -> None:
        self._recorder = recorder
        self._loop = loop
        self._stop: _thread.LockType | None = None  # of the thread that samples; it ends with it
        self._recorded = RecordedKind("the script's host work that only samples show")
        self._count = 0  # of samples and of wake-ups without one; goes on when sampling does
        # Not by code: code objects of different files can be equal.
        self._names: dict[tuple[str, str, int], int] = {}
        self._skipped: dict[str, bool] = {}
        self._other = recorder.intern("other functions")
        self._python_code = recorder.intern(PYTHON_CODE)

    def start(self) -> None:
        """Start sampling, or warn that no thread can be started: the script's loop goes on."""
        self._recorded.attempt(self._start)

    def _start(self) -> None:
        if self._stop is None:
            stop = _thread.allocate_lock()  # its own: an earlier thread may not have ended yet
            stop.acquire()
            _thread.start_new_thread(self._run, (stop,))
            self._stop = stop

    def stop(self) -> None:
        """Stop sampling; the thread may end a little later and records nothing any more."""
        if self._stop is not None:
            self._stop.release()
            self._stop = None

    def _run(self, stop: _thread.LockType) -> None:
        while True:
            interval_s = self._interval_s(self._count)
            due_ns = monotonic_ns() + int(interval_s * 1e9)
            if stop.acquire(timeout=interval_s):
                return
            self._count += 1
            self._recorded.attempt(self._sample, due_ns, monotonic_ns())

    @staticmethod
    def _interval_s(count: int) -> float:
        interval_s = FIRST_INTERVAL_S if count < FIRST_COUNT else INTERVAL_S
        return interval_s * (0.5 + (count * _GOLDEN) % 1.0)

    def _sample(self, due_ns: int, now_ns: int) -> None:
        """Record what the main thread executes now, at `now_ns`, or executed when this was due."""
        was_held = now_ns - due_ns > _HELD_NS
        name = 0
        if self._loop.phase == IDLE:
            frame = sys._current_frames().get(self._loop.main_thread)  # noqa: SLF001  # the documented way
            name = self.name_of(frame)
        # The GIL was held since the phase was read, but for switches between bytecodes: by then the
        # main thread may be in a phase.
        if self._loop.phase != IDLE:
            name = self._python_code if was_held else 0
        if name and self._stop is not None:
            at_ns = due_ns if was_held else now_ns
            self._recorder.record(int(Kind.SAMPLE), MAIN, name, at_ns, at_ns, now_ns - at_ns)

    def name_of(self, frame: FrameType | None) -> int:
        """Return the number of the name for a stack; 0 if no frame of it counts."""
        while frame is not None:
            code = frame.f_code
            skipped = self._skipped.get(code.co_filename)
            if skipped is None:
                skipped = self._skipped[code.co_filename] = _is_skipped(code.co_filename)
            if not skipped:
                return self._intern(frame, code)
            frame = frame.f_back
        return 0

    def _intern(self, frame: FrameType, code: CodeType) -> int:
        module = frame.f_globals.get("__name__", "?")
        is_script = module == "__main__"
        key = (code.co_filename, code.co_qualname, frame.f_lineno if is_script else 0)
        number = self._names.get(key)
        if number is None:
            if len(self._names) >= NAMES_MAX:
                return self._other
            name = f"{module}.{code.co_qualname}"
            if is_script:
                name = f"{Path(code.co_filename).name}:{frame.f_lineno}"
            name = name.encode(errors="backslashreplace").decode()  # a path need not be UTF-8
            number = self._names[key] = self._recorder.intern(name)
        return number


def _is_skipped(path: str) -> bool:
    """Return whether a frame of the file `path` says nothing of what the script does."""
    if path.startswith(_PASSED_OVER):
        return True
    return path.startswith(_STANDARD) and "-packages" not in path
