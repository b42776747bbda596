"""Decides the log of a queue again, and compares: the same events must give the same decisions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from paceline.core.record import Record
from paceline.scheduler.decide import decide
from paceline.scheduler.local.queue.database import Database, decision_text
from paceline.scheduler.local.queue.setup import make_queue

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.scheduler.local.queue.database import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(Record):
    """The first decision that is not as it was logged.

    Attributes:
        segment: of the log.
        event: number of the first event of the instant.
        at_s: seconds since the queue's first moment.
        logged, decided: JSON of the decision, then and now; empty if there was none.
    """

    segment: int
    event: int
    at_s: float
    logged: str
    decided: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay(Record):
    """What a replay came to.

    Attributes:
        segments, events, decisions: how many were compared.
        difference: the first one; None if all decisions are the same.
    """

    segments: int
    events: int
    decisions: int
    difference: Difference | None = None


def replay(path: Path) -> Replay:
    """Decide the log of a queue again.

    Args:
        path: of the database; it is only read, also while a daemon uses it.

    Raises:
        NotFound: there is none.
        CorruptData: it is damaged.
        UsageError: a policy of the log is not known any more.
    """
    database = Database(path)
    try:
        events = decisions = 0
        segments = database.segments()
        for segment in segments:
            seen, made, difference = _replay(database, segment)
            events += seen
            decisions += made
            if difference is not None:
                return Replay(
                    segments=segment.number,
                    events=events,
                    decisions=decisions,
                    difference=difference,
                )
        return Replay(segments=len(segments), events=events, decisions=decisions)
    finally:
        database.close()


def _replay(database: Database, segment: Segment) -> tuple[int, int, Difference | None]:
    queue = make_queue(segment.setup)
    events = decisions = 0
    for instant in database.instants(segment.number):
        made = [decision_text(d) for d in decide(queue.policy, queue.state, instant.events)]
        events += len(instant.events)
        decisions += len(instant.decisions)
        for logged, decided in zip_longest(instant.decisions, made, fillvalue=""):
            if logged != decided:
                return (
                    events,
                    decisions,
                    Difference(
                        segment=segment.number,
                        event=instant.number,
                        at_s=instant.events[0].at_s,
                        logged=logged,
                        decided=decided,
                    ),
                )
    return events, decisions, None
