"""What client and daemon say to each other: one JSON line there, one back, over a Unix socket.

    client                                          daemon
    {"version": 1, "verb": "submit", ...}    -->
                                             <--    {"version": 1, "jobs": [...], "error": null}

The socket's file has mode 0600, and the daemon also asks the kernel who connects: only the same
user may. A line has at most `MAX_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.record import Record
from paceline.scheduler.local.jobs.records import JobView
from paceline.scheduler.local.jobs.submission import Submission

MAX_BYTES = 64 << 20
VERBS = ("submit", "list", "why", "cancel", "wait")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Record):
    """What a client asks for.

    Attributes:
        verb: one of `VERBS`.
        submission: for ``submit``.
        name: of a job, for the other verbs; empty for ``list``: all.
        ended: also list jobs that have ended.
        timeout_s: of ``wait``: then the answer is the job as it stands.
    """

    verb: str
    submission: Submission | None = None
    name: str = ""
    ended: bool = False
    timeout_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply(Record):
    """What the daemon answers.

    Attributes:
        jobs: that the request is about.
        text: of ``why``.
        error: as `PacelineError.to_json` has it; None if there is none.
    """

    jobs: tuple[JobView, ...] = ()
    text: str = ""
    error: dict[str, str] | None = None
