"""A rank that Slurm or mpirun has started: it meets the others and runs its own worker.

Each task looks after its own rank alone. What it cannot see, how the others end, it learns in the
meeting: when one fails the others stop, and rank 0 knows of all.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

from paceline.core.affinity import allowed_cores, share
from paceline.core.config import environment
from paceline.core.errors import PacelineError, UsageError
from paceline.core.processes import GRACE_S, Exit, Stopped
from paceline.launch.meeting import Meeting

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.clock import Clock
    from paceline.launch.allocation import Allocation
    from paceline.launch.meeting import Start

_LOOK_S = 0.25  # how often a task looks whether another rank has failed
_PATIENCE_S = 1.0  # a rank whose peer is gone mostly ends by itself, and says why
_SETTLE_S = 0.3  # schedulers signal a task and its rank one after the other


def start_task(
    allocation: Allocation, command: list[str], run: Path, clock: Clock, *, bind: bool
) -> tuple[Exit, ...]:
    """Run this task's rank to its end.

    Returns:
        The exits of ranks that did not end well: on rank 0 of all, elsewhere of this one.

    Raises:
        DeadlineExceeded: a task did not come to the meeting.
    """
    meeting = Meeting(run, allocation.rank, allocation.world_size, clock)
    try:
        ended = _run_rank(allocation, command, meeting, bind=bind)
        if ended.code and ended.fate != "interrupted":
            clock.wait(threading.Event(), _SETTLE_S)  # we may be about to be stopped, too
    except Stopped as stop:
        ended = stop.to_exit(clock.wall_s())
    except PacelineError:
        if meeting.folder.is_dir():
            meeting.fail()
        raise
    if meeting.folder.is_dir():  # else rank 0 has not come, and nobody listens
        meeting.tell(ended)
    if allocation.rank != 0 or not meeting.began():
        return (ended,) if ended.code else ()
    try:
        return meeting.gather()
    except Stopped as stop:  # this rank is done, others are not
        meeting.tell(stop.to_exit(clock.wall_s()))
        return meeting.gather()


def _run_rank(allocation: Allocation, command: list[str], meeting: Meeting, *, bind: bool) -> Exit:
    cores = allowed_cores()
    start = meeting.start(socket.gethostname(), cores, lambda: _listen(allocation))
    environ = {
        **environment(),
        "RANK": str(allocation.rank),
        "WORLD_SIZE": str(allocation.world_size),
        "LOCAL_RANK": str(allocation.local_rank),
        "LOCAL_WORLD_SIZE": str(allocation.local_world_size),
        "MASTER_ADDR": start.address,
        "MASTER_PORT": str(start.port),
    }
    child = _spawn(command, environ, cores, start if bind else None)
    ended = threading.Event()

    def reap() -> None:
        child.wait()  # the task's own time limit is the launcher's
        ended.set()

    threading.Thread(target=reap, name="paceline-rank", daemon=True).start()
    fate = ""
    try:
        fate = _await_end(child, ended, meeting)
    except Stopped as stop:
        interrupted = stop.to_exit(meeting.clock.wall_s())
        _stop(child, ended, meeting.clock)
        return interrupted
    at_s = meeting.clock.wall_s()
    code = child.returncode
    name = signal.Signals(-code).name if code < 0 else ""
    return Exit(rank=allocation.rank, code=code, signal=name, fate=fate if code else "", at_s=at_s)


def _spawn(
    command: list[str], environ: dict[str, str], cores: tuple[int, ...], start: Start | None
) -> subprocess.Popen[bytes]:
    """Start the rank's worker on its part of the cores, which it takes over from this thread."""
    if start is None:
        return subprocess.Popen(command, env=environ)
    mine = share(cores, start.index, start.count, environ)
    if mine.cores or "OMP_NUM_THREADS" not in environ:
        environ = {**environ, "OMP_NUM_THREADS": str(mine.threads)}
    os.sched_setaffinity(0, mine.cores or cores)
    try:
        return subprocess.Popen(command, env=environ)
    finally:
        os.sched_setaffinity(0, cores)


def _await_end(child: subprocess.Popen[bytes], ended: threading.Event, meeting: Meeting) -> str:
    """Wait for the rank; return ``stopped`` if it had to be stopped because another failed."""
    clock = meeting.clock
    while not clock.wait(ended, _LOOK_S):
        if meeting.failed():
            if clock.wait(ended, _PATIENCE_S):
                return ""
            _stop(child, ended, clock)
            return "stopped"
    return ""


def _stop(child: subprocess.Popen[bytes], ended: threading.Event, clock: Clock) -> None:
    """Ask the rank to stop, so that it closes its trace; then make it."""
    child.send_signal(signal.SIGINT)
    if not clock.wait(ended, GRACE_S):
        child.kill()
        ended.wait()


def _listen(allocation: Allocation) -> tuple[str, int]:
    """Return an address and a free port of this host for rank 0."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return _address(allocation), port


def _address(allocation: Allocation) -> str:
    """Return a name of this host under which the other ranks can reach it."""
    if allocation.local_world_size == allocation.world_size:
        return "127.0.0.1"
    names = [allocation.first_host, socket.gethostname(), socket.getfqdn()]
    for name in filter(None, names):
        try:
            socket.getaddrinfo(name, None)
        except OSError:  # a node's name in Slurm need not be a host's name
            continue
        return name
    raise UsageError(
        "this host has no name that resolves",
        where=f"rank {allocation.rank}",
        why=f"tried {', '.join(filter(None, names))}",
        fix="Give the host a name in DNS or /etc/hosts",
    )
