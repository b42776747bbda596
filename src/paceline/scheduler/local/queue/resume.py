"""The queue that a log left, or one that goes on in a new segment of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.scheduler.local.queue.database import decision_text
from paceline.scheduler.local.queue.setup import make_queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.scheduler.local.queue.database import Database, Segment
    from paceline.scheduler.local.queue.job_queue import JobQueue
    from paceline.scheduler.local.queue.setup import Setup


def resume(
    database: Database, setup: Setup, now_s: float, say: Callable[[str], None]
) -> tuple[JobQueue, Segment]:
    """Rebuild the queue from its log, or begin a new segment of it.

    Args:
        database: of the queue.
        setup: what is decided by from now on.
        now_s: of the queue, for a new segment.
        say: gets a line if all jobs are decided anew.
    """
    last = database.last_segment()
    before = _decided_again(database, last) if last is not None else None
    if last is not None and last.setup.declared == setup:
        if before is not None:
            return before, last
        why = "this Paceline decides otherwise than the one that wrote the log"
    else:
        why = "its devices, rates or policy changed"
    same_devices = last is not None and last.setup.devices == setup.devices
    if last is not None:
        rates = last.setup.rates
        setup = setup.after(rates if before is None else before.learned_rates(rates))
    queue = make_queue(setup)
    queue.entries = database.entries()
    if queue.active:
        say(f"all jobs of the queue are decided anew: {why}")
    # The daemon carries out what this stops or starts when it adopts the live attempts.
    turn = queue.begin_anew(now_s, same_devices=same_devices)
    return queue, database.begin_segment(setup, turn, queue.entries)


def _decided_again(database: Database, segment: Segment) -> JobQueue | None:
    """Return the queue at the end of a segment; None if it cannot be decided as it was."""
    try:
        queue = make_queue(segment.setup)
    except UsageError:  # the policy of another version
        return None
    queue.entries = database.entries()
    for instant in database.instants(segment.number):
        decisions = queue.repeat(instant.events)
        if [decision_text(decision) for decision in decisions] != instant.decisions:
            return None
    return queue
