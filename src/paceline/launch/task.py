"""A task that Slurm or mpirun has started: runs its rank between the job's start and end.

Each task starts and ends only its own rank. The task learns from the rendezvous how the other ranks
ended: when one rank fails, every other task stops its rank, and rank 0 learns how all ranks ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

from paceline.core.affinity import allowed_cores, core_binding
from paceline.core.config import environment
from paceline.core.processes import GRACE_S, StopRequested
from paceline.launch.exits import RankExit, exit_of, interrupted_exit

if TYPE_CHECKING:
    from paceline.core.clock import Clock
    from paceline.launch.allocation import Allocation
    from paceline.launch.rendezvous.job import TaskRendezvous
    from paceline.launch.rendezvous.messages import StartInfo

_POLL_INTERVAL_S = 0.25  # how often a task checks whether it must stop its rank
_PEER_LOSS_GRACE_S = 1.0  # a rank that lost a peer mostly ends by itself, and reports why
_SIGNAL_DELAY_S = 0.3  # schedulers signal a task and its rank one after the other


def run_task(
    allocation: Allocation,
    command: list[str],
    rendezvous: TaskRendezvous,
    clock: Clock,
    *,
    bind: bool,
) -> tuple[RankExit, ...]:
    """Run this task's rank to its end.

    Returns:
        Rank 0 returns the exits of all ranks that did not end well, any other task only its own
        rank's.

    Raises:
        DeadlineExceeded: a task did not arrive.
        RankLost: a task failed before all had arrived.
    """
    rank = allocation.rank
    try:
        rendezvous.start()
        ended = _run_rank(allocation, command, rendezvous, clock, bind=bind)
        if ended.code:
            clock.wait(threading.Event(), _SIGNAL_DELAY_S)  # a stop signal may be about to come
    except StopRequested as stop:
        ended = interrupted_exit(rank, stop, clock.wall_s())
    if not rendezvous.started:  # interrupted before any other task knew of this task
        return (ended,)
    rendezvous.report(ended)
    if rank != 0:
        return (ended,) if ended.code else ()
    try:
        return rendezvous.gather()
    except StopRequested as stop:  # this rank has ended, other ranks have not
        rendezvous.interrupt(interrupted_exit(rank, stop, clock.wall_s()))
        return rendezvous.gather()


def _run_rank(
    allocation: Allocation,
    command: list[str],
    rendezvous: TaskRendezvous,
    clock: Clock,
    *,
    bind: bool,
) -> RankExit:
    """Start the rank when all tasks have arrived, and return how it ended."""
    start = rendezvous.await_start()
    environ = {
        **environment(),
        "RANK": str(allocation.rank),
        "WORLD_SIZE": str(allocation.world_size),
        "LOCAL_RANK": str(allocation.local_rank),
        "LOCAL_WORLD_SIZE": str(allocation.local_world_size),
        "MASTER_ADDR": start.address,
        "MASTER_PORT": str(start.port),
    }
    child = _spawn(command, environ, start if bind else None)
    ended = threading.Event()

    def reap() -> None:
        child.wait()  # no deadline: Slurm or mpirun enforces the job's time limit
        ended.set()

    threading.Thread(target=reap, name="paceline-rank", daemon=True).start()
    try:
        stopped = _await_end(child, ended, rendezvous, clock)
    except StopRequested:
        _stop(child, ended, clock)
        raise
    return exit_of(allocation.rank, child.returncode, stopped=stopped, at_s=clock.wall_s())


def _spawn(
    command: list[str], environ: dict[str, str], start: StartInfo | None
) -> subprocess.Popen[bytes]:
    """Start the rank's worker on its share of the cores, which it inherits from this thread."""
    if start is None:
        return subprocess.Popen(command, env=environ)
    cores = allowed_cores()
    binding = core_binding(cores, start.share_index, start.share_count, environ)
    if binding.cores or "OMP_NUM_THREADS" not in environ:
        environ = {**environ, "OMP_NUM_THREADS": str(binding.threads)}
    os.sched_setaffinity(0, binding.cores or cores)
    try:
        return subprocess.Popen(command, env=environ)
    finally:
        os.sched_setaffinity(0, cores)


def _await_end(
    child: subprocess.Popen[bytes],
    ended: threading.Event,
    rendezvous: TaskRendezvous,
    clock: Clock,
) -> bool:
    """Wait for the rank; return whether this task stopped it because another rank failed."""
    while not clock.wait(ended, _POLL_INTERVAL_S):
        if rendezvous.stop_reason():
            if clock.wait(ended, _PEER_LOSS_GRACE_S):
                return False
            _stop(child, ended, clock)
            return True
    return False


def _stop(child: subprocess.Popen[bytes], ended: threading.Event, clock: Clock) -> None:
    """Send SIGINT, so that the rank closes its trace; after GRACE_S send SIGKILL."""
    child.send_signal(signal.SIGINT)
    if not clock.wait(ended, GRACE_S):
        child.kill()
        ended.wait()
