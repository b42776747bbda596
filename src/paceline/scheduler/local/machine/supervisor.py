"""The parent of a job's processes: starts them, stops them, and writes down how they ended.

``python -m paceline.scheduler.local.machine.supervisor FOLDER DESCRIPTOR``, started by the daemon
in a session of its own. It outlives the daemon: whatever the job comes to stands in its folder when
a daemon looks next, and a grace period ends on time although there is no daemon.

    SIGUSR1    the job is preempted: its stop signal, after the grace period SIGKILL
    SIGTERM    the job is cancelled: SIGTERM, after the grace period SIGKILL
    SIGCHLD    a process ended

These signals are blocked and taken one by one, so that no handler interrupts anything. When the
supervisor itself is killed, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.clock import SystemClock
from paceline.core.processes import (
    PREEMPTION_SIGNALS,
    STOP_SIGNALS,
    become_reaper,
    die_with_parent,
    end_descendants,
)
from paceline.scheduler.local.jobs.records import Exit
from paceline.scheduler.local.machine.attempt import AttemptFolder, Claim

if TYPE_CHECKING:
    from paceline.core.clock import Clock
    from paceline.scheduler.local.machine.attempt import Order

PREEMPT, CANCEL = signal.SIGUSR1, signal.SIGTERM
BEGAN = b"1"
_SIGNALS = {PREEMPT, CANCEL, signal.SIGCHLD}
_DEFAULT = (*PREEMPTION_SIGNALS, *STOP_SIGNALS)
_IDLE_S = 3600.0  # a wait has an end; nothing happens at it
_LOOK_S = 10.0  # between two looks at the size of the log
# What is wrong with the command itself. All else may pass: no memory, no process, no space, a
# program that is being written, a folder of a file server that is away for a moment.
_LASTING = {
    *(errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.E2BIG, errno.ENOTDIR, errno.EISDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.ELIBBAD),
}


def supervise(folder: AttemptFolder, notify: int, clock: Clock) -> None:
    """Run the command of an attempt to its end, unless another process has claimed the attempt.

    Args:
        folder: of the attempt.
        notify: a pipe to the daemon: `BEGAN` says that the command runs, any other text why it does
            not, its end that it never will.
        clock: for the grace period.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        folder.reserve()
        claimed = folder.claim(Claim.of_this_process())
    except OSError as problem:  # not into a file: the disk may be full
        _notify(notify, str(problem).encode())
        return
    if not claimed:
        folder.release()
        return
    become_reaper()
    order = folder.read_order()
    try:
        child = _start(order, folder)
    except (OSError, subprocess.SubprocessError) as problem:
        number = problem.errno if isinstance(problem, OSError) else None
        why = os.strerror(number) if number else str(problem)
        error = f"{order.command[0]} cannot be started: {why}"
        folder.finish(Exit(code=127, error=error, passing=number not in _LASTING))
        return
    _notify(notify, BEGAN)
    os.close(notify)
    ended = _watch(child, order, folder, clock)
    end_descendants(clock)  # what it left in the background: its devices are given away now
    folder.finish(ended)


def _notify(pipe: int, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # no daemon: the next one looks into the folder
        os.write(pipe, text[: select.PIPE_BUF])


def _start(order: Order, folder: AttemptFolder) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    if order.cores:
        os.sched_setaffinity(0, order.cores)

    def prepare() -> None:
        for number in _DEFAULT:  # a shell's background job, for one, ignores SIGINT
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        die_with_parent(parent)

    with folder.log.open("ab") as log:
        return subprocess.Popen(
            order.command,
            cwd=order.folder,
            env=order.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=prepare,
        )


def _watch(
    child: subprocess.Popen[bytes], order: Order, folder: AttemptFolder, clock: Clock
) -> Exit:
    """Pass signals on, and bound the log, until the command has ended; return how it did."""
    kill_at_s: float | None = None
    killed = False
    while child.poll() is None:
        folder.bound_log(order.log_bytes)
        idle_s = _LOOK_S if order.log_bytes else _IDLE_S
        left_s = idle_s if kill_at_s is None else max(0.0, kill_at_s - clock.now_s())
        left_s = min(left_s, idle_s)
        came = signal.sigtimedwait(_SIGNALS, left_s)
        if came is not None and came.si_signo in (PREEMPT, CANCEL):
            _signal(child, order.stop_signal if came.si_signo == PREEMPT else signal.SIGTERM)
            at_s = clock.now_s() + order.grace_s
            kill_at_s = at_s if kill_at_s is None else min(at_s, kill_at_s)
        elif kill_at_s is not None and not killed and clock.now_s() >= kill_at_s:
            killed = child.poll() is None
            _signal(child, signal.SIGKILL)
            kill_at_s = None
    return Exit(code=child.returncode, killed=killed)


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to all processes of the command; it is not reaped, so the group is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    supervise(AttemptFolder(Path(sys.argv[1])), int(sys.argv[2]), SystemClock())
