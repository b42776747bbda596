"""A member of a rendezvous as a state machine without I/O: connects to the root, starts, stops.

A member is a task's side of the rendezvous. Its connection may break and be made again; the member
gives up only if it has not heard the root for too long. It sends a report every heartbeat interval
and whenever its state changes. Each answer shows that the root is alive; a report without an answer
is repeated sooner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.core.randomness import make_generator
from paceline.launch.exits import RankExit
from paceline.launch.rendezvous.messages import JobEnd, JobPhase, Notice, StartInfo, TaskReport
from paceline.launch.rendezvous.root import Deadlines, Tick

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0
_GREETING_S = 5.0  # for the first answer on a connection: a stranger's port says nothing
_REPEATS = 5  # in a heartbeat interval, of a report that the root has not answered


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Event: the connection that `Connect` asked for is there."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """Event: the connection is gone, or could not be made."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """Event: a notice came."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class RankEnded:
    """Event: this task's ranks ended, or its launcher was interrupted; see `TaskReport`."""

    ended: RankExit
    others: tuple[RankExit, ...] = ()


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """Event: this task does not wait for the result of the run.

    Attributes:
        at_once: do not even wait until the root knows how the task's rank ended.
    """

    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """Action: connect to the root.

    Attributes:
        attempt: 0, 1, ... since the last connection; later attempts also try files.
    """

    attempt: int


@dataclass(frozen=True, slots=True)
class SendReport:
    """Action: send to the root."""

    report: TaskReport


@dataclass(frozen=True, slots=True)
class Hangup:
    """Action: close the connection."""


@dataclass(frozen=True, slots=True)
class StartRank:
    """Action: all tasks have arrived; start the rank."""

    start: StartInfo


@dataclass(frozen=True, slots=True)
class StopRank:
    """Action: end the rank, or do not start it: another rank failed, or the root is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Action: this member leaves the rendezvous.

    Attributes:
        end: the result of the run; None if the task does not need it, or cannot get it.
        problem: why the task cannot get the result; empty if it can.
    """

    end: JobEnd | None = None
    problem: str = ""


MemberEvent = LinkUp | LinkDown | Noticed | RankEnded | CloseAsked | Tick
MemberAction = Connect | SendReport | Hangup | StartRank | StopRank | Leave


@dataclass(slots=True)
class MemberState:
    """A member's state; one thread calls `handle`.

    Attributes:
        identity: a report with the fields that never change.
        deadlines: deadlines that hold until the first notice, which has the root's.
        begin_s: when the member began to connect, seconds of a monotonic clock.
        stays: whether it waits for the end of the run also when its own ranks have succeeded:
            other nodes read data from its node.
    """

    identity: TaskReport
    deadlines: Deadlines
    begin_s: float
    stays: bool = False
    phase: JobPhase = JobPhase.GATHERING
    run: str = ""
    started: bool = False
    left: bool = False
    refusal: str = ""
    _ended: RankExit | None = None
    _others: tuple[RankExit, ...] = ()
    _linked: bool = False
    _sent_s: float = 0.0
    _linked_s: float = 0.0
    _connecting: bool = False
    _attempt: int = 0
    _retry_s: float = 0.0
    _report_s: float = 0.0
    _heard_s: float = 0.0
    _heard_end: bool = False
    _stopped: bool = False
    _closing: bool = False
    _end: JobEnd | None = None
    _interval_s: float = field(init=False, default=0.0)
    _timeout_s: float = field(init=False, default=0.0)
    _jitter: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        # Tasks that start together must not retry together; a rank's delays are reproducible.
        self._jitter = make_generator(self.identity.rank, "rendezvous retry")
        self._heard_s = self._retry_s = self.begin_s
        self._interval_s = self.deadlines.heartbeat_interval_s
        self._timeout_s = self.deadlines.heartbeat_timeout_s

    def handle(self, event: MemberEvent, now_s: float) -> list[MemberAction]:
        """Return what to do about `event`, which happened at `now_s` of a monotonic clock."""
        if self.left:
            return []
        actions: list[MemberAction] = []
        match event:
            case LinkUp():
                self._linked, self._connecting = True, False
                self._report_s = self._linked_s = now_s
            case LinkDown():
                self._on_link_down(now_s)
            case Noticed():
                actions = self._on_notice(event.notice, now_s)
            case RankEnded():
                self._ended, self._others, self._report_s = event.ended, event.others, now_s
                self._heard_end = False
            case CloseAsked():
                self._closing = True
                if event.at_once:
                    return self._leave(Leave())
        return actions + self._conclude(now_s)

    def wakeup_s(self) -> float:
        """Return when the next `Tick` is due, on the clock of `handle`."""
        if self._connecting:
            return self._deadline_s()
        if self._linked:
            return min(self._report_s, self._silent_link_s(), self._deadline_s())
        return min(self._retry_s, self._deadline_s())

    def _on_link_down(self, now_s: float) -> None:
        self._linked = self._connecting = False
        pause_s = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2**self._attempt)
        self._retry_s = now_s + pause_s * float(self._jitter.uniform(0.5, 1.5))
        self._attempt = min(self._attempt + 1, 30)

    def _on_notice(self, notice: Notice, now_s: float) -> list[MemberAction]:
        if notice.refusal:
            self.refusal = notice.refusal
            # A root of another job or run, or one that has not yet given up this rank's last task.
            self._on_link_down(now_s)
            return [Hangup()]
        if self.run and notice.run != self.run:
            return []
        self.run, self.refusal, self._heard_s, self._attempt = notice.run, "", now_s, 0
        self._interval_s = notice.heartbeat_interval_s
        self._timeout_s = notice.heartbeat_timeout_s
        self._heard_end = self._heard_end or notice.heard_end
        if self._heard_end or self._ended is None:
            self._report_s = self._sent_s + self._interval_s
        self.phase = max(self.phase, notice.phase)
        self._end = self._end or notice.end
        actions: list[MemberAction] = []
        if notice.start is not None and not self.started and not self._stopped:
            self.started = True
            actions.append(StartRank(notice.start))
        if self.phase is JobPhase.STOPPING:
            actions += self._stop_rank(notice.reason)
        return actions

    def _stop_rank(self, reason: str) -> list[MemberAction]:
        if self._stopped or self._ended:
            return []
        self._stopped = True
        return [StopRank(reason)]

    def _conclude(self, now_s: float) -> list[MemberAction]:
        """Return the actions that follow from state and time."""
        is_done = self._ended is not None and not self._ended.code and not self.stays
        need_not_wait = self._closing or is_done
        is_known = self._heard_end if self._ended is not None else self._closing
        if self._end is not None or (need_not_wait and is_known):
            return self._leave(Leave(self._end))
        actions: list[MemberAction] = []
        if now_s >= self._deadline_s():
            actions += self._stop_rank(self._silence())
            if self._ended is not None or not self.started:
                return actions + self._leave(Leave(problem=self._silence()))
        if self._linked and now_s >= self._silent_link_s():
            self._on_link_down(
                now_s
            )  # a host without power closes nothing; a stranger says nothing
            actions.append(Hangup())
        if self._linked and now_s >= self._report_s:
            self._sent_s, self._report_s = now_s, now_s + self._interval_s / _REPEATS
            actions.append(SendReport(self._report()))
        if not self._linked and not self._connecting and now_s >= self._retry_s:
            self._connecting = True
            actions.append(Connect(self._attempt))
        return actions

    def _leave(self, leave: Leave) -> list[MemberAction]:
        self.left = True
        last = [SendReport(self._report(leaving=True))] if self._linked else []
        return [*last, leave]

    def _report(self, *, leaving: bool = False) -> TaskReport:
        base = self.identity
        return TaskReport(
            job=base.job,
            run=self.run,
            task=base.task,
            rank=base.rank,
            world_size=base.world_size,
            host=base.host,
            cores=base.cores,
            ended=self._ended,
            others=self._others,
            leaving=leaving,
            data=base.data,
        )

    def _deadline_s(self) -> float:
        if self._stopped and self._ended is None and self.started:
            return float("inf")  # its rank is being ended, which has a deadline of its own
        if not self.run:
            return self.begin_s + self.deadlines.rendezvous_timeout_s
        return self._heard_s + self._timeout_s

    def _silent_link_s(self) -> float:
        if self._heard_s < self._linked_s:
            return self._linked_s + min(_GREETING_S, 1.5 * self._interval_s)
        return self._heard_s + 1.5 * self._interval_s

    def _silence(self) -> str:
        if not self.run:
            return self.refusal or "rank 0 did not arrive"
        return f"rank 0 was not heard of for {self._timeout_s:g} s"
