"""One launcher among several: its ranks run between the start and the end of the whole job.

Each launcher (a task of Slurm or mpirun, or a node of ``--nnodes``) starts and ends only its own
ranks. It learns from the rendezvous how the others' ranks ended: when a rank fails, every other
launcher stops its ranks, and rank 0's launcher learns how all ranks ended.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from paceline.core.processes import StopRequested
from paceline.launch.exits import explaining_exits, interrupted_exit
from paceline.launch.ranks import SIGNAL_DELAY_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.clock import Clock
    from paceline.launch.exits import RankExit
    from paceline.launch.ranks import LocalRanks
    from paceline.launch.rendezvous.job import TaskRendezvous
    from paceline.launch.rendezvous.messages import StartInfo

_MAX_OTHERS = 64  # exits in a report, which has a limit in bytes


def run_task(
    number: int,
    local: LocalRanks,
    start: Callable[[StartInfo], None],
    rendezvous: TaskRendezvous,
    clock: Clock,
    stop_reason: Callable[[], str] = str,
) -> tuple[RankExit, ...]:
    """Run this launcher's ranks to their end.

    Args:
        number: of this launcher; the one with number 0 has rank 0.
        local: the ranks.
        start: starts them when all launchers have arrived.
        rendezvous: where the launchers meet.
        clock: for waits and the times of exits.
        stop_reason: why this launcher's ranks are to end; empty while they may go on.

    Returns:
        Rank 0's launcher returns the exits of all ranks that did not end well, any other launcher
        only its own ranks'.

    Raises:
        DeadlineExceeded: a task did not arrive.
        RankLost: a task failed before all had arrived.
    """
    try:
        rendezvous.start()
        start(rendezvous.await_start())
        local.wait(lambda: stop_reason() or rendezvous.stop_reason())
        exits = explaining_exits(local.exits())
        if exits:
            clock.wait(threading.Event(), SIGNAL_DELAY_S)  # a stop signal may be about to come
    except StopRequested as stop:
        local.stop(SIGNAL_DELAY_S)
        exits = (interrupted_exit(rendezvous.first_rank, stop, clock.wall_s()),)
    if not rendezvous.started:  # interrupted before any other task knew of this task
        return exits
    others = sorted(exits[1:], key=lambda ended: ended.code != 0)  # who left may be the cause
    rendezvous.report(exits[0] if exits else local.exits()[0], tuple(others[:_MAX_OTHERS]))
    if number != 0:
        return exits
    try:
        return rendezvous.gather()
    except StopRequested as stop:  # these ranks have ended, others have not
        rendezvous.interrupt(interrupted_exit(rendezvous.first_rank, stop, clock.wall_s()))
        return rendezvous.gather()
