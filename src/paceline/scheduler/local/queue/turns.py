"""Inputs of the queue's state machine, what it keeps of each job, and its answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from paceline.scheduler.decide import Decision
from paceline.scheduler.events import Event
from paceline.scheduler.local.jobs.records import ENDED, Attempt, Exit, JobStatus, JobView
from paceline.scheduler.local.jobs.submission import Submission
from paceline.scheduler.placement import Placement

if TYPE_CHECKING:
    from paceline.scheduler.job import Job


class Submit(NamedTuple):
    """A user submitted a job, which has its name."""

    submission: Submission


class Cancel(NamedTuple):
    """A user withdrew a job."""

    name: str


class Began(NamedTuple):
    """The process of an attempt runs."""

    name: str
    number: int


class Exited(NamedTuple):
    """The process of an attempt ended."""

    name: str
    number: int
    exit: Exit


class Progress(NamedTuple):
    """A job reported how far it is."""

    name: str
    number: int
    work_done: float
    rate: float | None


class TimerExpired(NamedTuple):
    """The moment came at which the queue wanted to be asked."""


class DevicesSeen(NamedTuple):
    """Somebody looked which devices are there.

    Attributes:
        present: their indices.
        reason: why others are not, in words about one of them.
    """

    present: frozenset[int]
    reason: str


Input: TypeAlias = Submit | Cancel | Began | Exited | Progress | TimerExpired | DevicesSeen


@dataclass(slots=True)
class Entry:
    """A job of the queue.

    Attributes:
        submission: with the job's name.
        status: a `JobStatus`.
        wanted: the devices on which it shall run; None if it shall wait.
        attempt: its live attempt; None if no process of it may exist.
        starts: number of its last attempt.
        own_stops: how often it stopped although nobody asked it to.
        lost_by_stop: how its preemption ended it, in words, if it did not save its state: it is not
            preempted again; else empty.
        failed_starts: how often in a row it could not be started.
        retry_s: when it is tried again, if it waits for that; the policy does not know it then.
        submitted_s, began_s, ended_s: seconds since the queue's first moment.
        work_done, rate: as it reported last.
        exit_code: of its end.
        reason: why it waits, stopped or ended, in words.
        measured_s: when the policy saw its progress last.
        beside: other jobs that ran on its devices then, or when it began; None: not known.
    """

    submission: Submission
    status: str = JobStatus.WAITING
    wanted: Placement | None = None
    attempt: Attempt | None = None
    starts: int = 0
    own_stops: int = 0
    lost_by_stop: str = ""
    failed_starts: int = 0
    retry_s: float | None = None
    submitted_s: float = 0.0
    began_s: float | None = None
    ended_s: float | None = None
    work_done: float = 0.0
    rate: float | None = None
    exit_code: int | None = None
    reason: str = ""
    measured_s: float | None = field(default=None, compare=False)
    beside: set[str] | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.submission.job.name

    @property
    def job(self) -> Job:
        """The job as the policy sees it."""
        if not self.lost_by_stop:
            return self.submission.job
        return replace(self.submission.job, preemptible=False)

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.status in ENDED

    def view(self, epoch_s: float, log: str) -> JobView:
        """Return the job as users see it; `epoch_s` is the queue's first moment since 1970."""
        placement = self.attempt.placement if self.attempt else None

        def wall_s(at_s: float | None) -> float | None:
            return None if at_s is None else epoch_s + at_s

        return JobView(
            name=self.name,
            status=self.status,
            devices=placement.devices if placement else self.submission.job.devices,
            command=self.submission.command,
            tenant=self.submission.job.tenant,
            profile=self.submission.job.profile,
            deadline_s=wall_s(self.submission.job.deadline_s),
            where=placement.describe() if placement else "",
            starts=self.starts,
            submitted_s=epoch_s + self.submitted_s,
            began_s=wall_s(self.began_s),
            ended_s=wall_s(self.ended_s),
            work=self.submission.job.work,
            work_done=self.work_done,
            rate=self.rate,
            exit_code=self.exit_code,
            reason=self.reason,
            log=log,
        )


@dataclass(slots=True)
class Turn:
    """What an instant changed, and what there is to do.

    Attributes:
        events, decisions: for the log.
        changed: names of jobs whose entry changed.
        begun, ended: attempts that became live, or that ended.
        starts: attempts to start.
        stops: attempts to ask to end, for the reason that they carry.
        notes: lines for who watches the daemon.
    """

    events: list[Event] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    changed: dict[str, None] = field(default_factory=dict)
    ended: list[Attempt] = field(default_factory=list)
    starts: list[Attempt] = field(default_factory=list)
    stops: list[Attempt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
