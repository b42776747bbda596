"""What became of a job and of each of its attempts, as the database and the socket have them.

waiting -> starting -> running -> done | failed
   ^                      |
   +----- stopping <------+           cancelled, refused: from any of them
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.core.record import Record
from paceline.scheduler.placement import Placement


class JobStatus(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    STARTING = "starting"  # it was given devices; its process does not run yet
    RUNNING = "running"
    STOPPING = "stopping"  # it was asked to save its state and end
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"


ENDED = (JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.REFUSED)


class Stop(StrEnum):
    """Why an attempt was asked to end."""

    NONE = ""
    PREEMPT = "preempt"
    CANCEL = "cancel"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit(Record):
    """How an attempt ended.

    Attributes:
        code: exit code of the command, negative for a signal; None if that is not known: its
            supervisor was killed, or the machine stopped.
        killed: its grace period had passed.
        error: why the command was not started, in words; empty if it was.
        passing: that may be over at the next try: no space, no process, a folder that is away.
        tail: the last lines of its log.
    """

    code: int | None
    killed: bool = False
    error: str = ""
    passing: bool = False
    tail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt(Record):
    """A start of a job, from the decision to the exit of its process.

    Attributes:
        job: its name.
        number: 1 for the first.
        placement: the devices that it holds.
        stop: why it was asked to end, if it was.
        began: its process runs, or ran.
    """

    job: str
    number: int
    placement: Placement
    stop: str = Stop.NONE
    began: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView(Record):
    """A job as `paceline queue ls` shows it.

    Attributes:
        name, tenant, profile, command: as submitted.
        status: a `JobStatus`.
        devices: that it holds, or asked for.
        where: the devices that it holds, in short form.
        starts: how often it was started.
        submitted_s, began_s, ended_s: seconds since 1970; of the first start, and the end.
        deadline_s: seconds since 1970 by which it should end.
        work, work_done, rate: units of work in all, done, and per second, as far as known.
        exit_code: of its end; negative for a signal.
        reason: why it waits, stopped or ended, in words.
        log: path of the log of its last start.
    """

    name: str
    status: str
    devices: int
    command: tuple[str, ...]
    tenant: str = ""
    profile: str = ""
    where: str = ""
    starts: int = 0
    submitted_s: float = 0.0
    began_s: float | None = None
    ended_s: float | None = None
    deadline_s: float | None = None
    work: float | None = None
    work_done: float = 0.0
    rate: float | None = None
    exit_code: int | None = None
    reason: str = ""
    log: str = ""
