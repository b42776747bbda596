"""Runs a program that is not ours, and leaves nothing of it running when the launcher is killed.

::

    launcher --> guard --> program (torchrun, a shell script) --> ranks, loader workers, ...

A program's own children do not learn that a launcher three generations above was killed. The guard
gets a signal from the kernel then, and ends all that is below it. Otherwise the program's end, exit
code or signal, becomes the guard's own.

``python -m paceline.launch.guard LAUNCHER COMMAND...``, with the launcher's process id.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from paceline.core.clock import SystemClock
from paceline.core.config import environment
from paceline.core.processes import (
    become_reaper,
    die_with_parent,
    end_descendants,
    is_background_job,
    outlive_preemption,
    signal_descendants,
)
from paceline.launch.task_placement import mpirun_descriptors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

STOP_SIGNAL = signal.SIGTERM  # by which the launcher has the guard stop its program


def guard(launcher: int, command: Sequence[str]) -> int:
    """Run a command to its end; return its exit code, negative for a signal.

    A terminal sends its SIGINT to the program as well, so the guard ignores it. The launcher sends
    `STOP_SIGNAL`, which all processes of the program receive as SIGINT, as from a terminal: a shell
    that waits for a child would not pass it on. The program ignores SIGINT if this process was
    started so, but for a background job.
    """
    become_reaper()
    outlive_preemption()
    background = is_background_job()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def stop(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != launcher:  # it was killed
            end_descendants(SystemClock())
            os._exit(1)
        signal_descendants(signal.SIGINT)

    if background:
        before = signal.SIG_DFL
    signal.signal(STOP_SIGNAL, stop)
    die_with_parent(launcher, STOP_SIGNAL)
    try:
        child = subprocess.Popen(
            command,
            preexec_fn=lambda: signal.signal(signal.SIGINT, before),
            pass_fds=mpirun_descriptors(environment()),
        )
    except (OSError, subprocess.SubprocessError) as problem:  # no interpreter, another architecture
        why = problem.strerror if isinstance(problem, OSError) else str(problem)
        sys.stderr.write(f"cannot execute {command[0]}: {why}\n")
        return 126
    return child.wait()  # no deadline: a run lasts as long as it lasts


def leave_like(code: int) -> int:
    """Return an exit code to end with, or end by the signal that ended the program."""
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left one, if any
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code  # of a signal that did not end us


if __name__ == "__main__":
    sys.exit(leave_like(guard(int(sys.argv[1]), sys.argv[2:])))
