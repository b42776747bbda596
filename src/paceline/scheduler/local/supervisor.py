"""The parent of a job's processes: starts them, stops them, and writes down how they ended.

``python -m paceline.scheduler.local.supervisor FOLDER DESCRIPTOR``, started by the daemon in a
session of its own. It outlives the daemon: whatever the job comes to stands in its folder when a
daemon looks next, and a grace period ends on time although there is no daemon.

    SIGUSR1    the job is preempted: its stop signal, after the grace period SIGKILL
    SIGTERM    the job is cancelled: SIGTERM, after the grace period SIGKILL
    SIGCHLD    a process ended

These signals are blocked and taken one by one, so that no handler interrupts anything. When the
supervisor itself is killed, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import os
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
from paceline.scheduler.local.attempt import AttemptFolder, Claim
from paceline.scheduler.local.records import Exit

if TYPE_CHECKING:
    from paceline.core.clock import Clock
    from paceline.scheduler.local.attempt import Order

PREEMPT, CANCEL = signal.SIGUSR1, signal.SIGTERM
_SIGNALS = {PREEMPT, CANCEL, signal.SIGCHLD}
_DEFAULT = (*PREEMPTION_SIGNALS, *STOP_SIGNALS)
_IDLE_S = 3600.0  # a wait has an end; nothing happens at it


def supervise(folder: AttemptFolder, notify: int, clock: Clock) -> None:
    """Run the command of an attempt to its end, unless another process has claimed the attempt.

    Args:
        folder: of the attempt.
        notify: a pipe to the daemon: a byte says that the command runs, its end that it never will.
        clock: for the grace period.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if not folder.claim(Claim.of_this_process()):
        return
    become_reaper()
    order = folder.read_order()
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    try:
        child = _start(order, folder)
    except (OSError, subprocess.SubprocessError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else str(problem)
        folder.finish(Exit(code=127, error=f"{order.command[0]} cannot be started: {why}"))
        return
    with contextlib.suppress(BrokenPipeError):  # no daemon: it finds the claim
        os.write(notify, b"1")
    os.close(notify)
    ended = _watch(child, order, clock)
    end_descendants(clock)  # what it left in the background: its devices are given away now
    folder.finish(ended)


def _start(order: Order, folder: AttemptFolder) -> subprocess.Popen[bytes]:
    parent = os.getpid()

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


def _watch(child: subprocess.Popen[bytes], order: Order, clock: Clock) -> Exit:
    """Pass signals on until the command has ended; return how it did."""
    kill_at_s: float | None = None
    killed = False
    while child.poll() is None:
        left_s = _IDLE_S if kill_at_s is None else max(0.0, kill_at_s - clock.now_s())
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
