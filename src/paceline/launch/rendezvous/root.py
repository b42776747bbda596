"""The root of a rendezvous as a state machine without I/O: which tasks arrived, ended, are lost.

The members of all tasks report to the root. The root runs in a thread of rank 0's launcher, the
``paceline run`` process that also starts rank 0; that launcher writes the result of the run. With
``--nnodes`` a task is the launcher of a node and starts several ranks. ::

    phase       what happens                                   next phase    action
    ---------   --------------------------------------------   -----------   --------
    GATHERING   all tasks have reported                        RUNNING
                timeout, or a task failed                      STOPPING
    RUNNING     a rank failed, or a task is lost               STOPPING
                the ranks of all tasks have ended well                       AllEnded
    STOPPING    all tasks have ended or are lost, or timeout                 AllEnded
    RUNNING or  rank 0's launcher has written the result       FINISHED
    STOPPING

`handle(event, now_s)` returns actions; the shell carries them out and never decides. Lost, repeated
and late reports are harmless because a report is a state, see `messages`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from paceline.launch.exits import ExitOutcome, RankExit, explaining_exits
from paceline.launch.rendezvous.data import data_starts
from paceline.launch.rendezvous.messages import JobEnd, JobPhase, Notice, StartInfo, TaskReport
from paceline.launch.rendezvous.shares import core_shares, name_ranks

Peer = Hashable
_TOO_LATE = "the run has begun without this task"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long the tasks of a job wait for each other.

    Attributes:
        rendezvous_timeout_s: the longest wait until all tasks have arrived.
        heartbeat_interval_s: time between two reports of a task.
        heartbeat_timeout_s: a task without a report for so long is lost; so is the root if a
            member gets no answer for so long.
        stop_timeout_s: time that tasks have to end their ranks when another rank has failed.
    """

    rendezvous_timeout_s: float = 120.0
    heartbeat_interval_s: float = 10.0
    heartbeat_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Received:
    """Event: a report arrived over the connection `peer`."""

    peer: Peer
    report: TaskReport
    address: str = ""  # from which the task has connected; empty: it reports through files


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Event: the connection is gone."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class AddressChosen:
    """Event: the answer to `ChooseAddress`."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Event: rank 0's launcher got a stop signal after its own rank had ended."""

    ended: RankExit


@dataclass(frozen=True, slots=True)
class ResultWritten:
    """Event: rank 0's launcher has written the result of the run."""

    end: JobEnd


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed."""


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Action: send to the peer."""

    peer: Peer
    notice: Notice


@dataclass(frozen=True, slots=True)
class Drop:
    """Action: close the peer's connection after sending the pending notices."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ChooseAddress:
    """Action: choose MASTER_ADDR and MASTER_PORT, where the process group of rank 0 listens."""


@dataclass(frozen=True, slots=True)
class AllEnded:
    """Action: hand rank 0's launcher what it needs for the result of the run.

    Attributes:
        exits: the exits that explain how the run ended, from `exits.explaining_exits`; empty if
            every rank succeeded.
        missing: numbers of the tasks that did not arrive in time; if any, the run has not started.
        present: numbers of the tasks that arrived.
    """

    exits: tuple[RankExit, ...]
    missing: tuple[int, ...] = ()
    present: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Action: close; no task still expects the result of the run."""


RootEvent = Received | Disconnected | AddressChosen | StopAsked | ResultWritten | Tick
RootAction = SendNotice | Drop | ChooseAddress | AllEnded | Finished


@dataclass(slots=True)
class _Task:
    """The root's knowledge of a task.

    `ended` is how its rank ended (of several: the first that ended badly, else the first), `others`
    further exits that may explain the run's end. `gone_s` is when its connection closed, `lost`
    whether it stopped reporting, `left` whether its last report has come.
    """

    report: TaskReport
    peer: Peer
    heard_s: float
    address: str = ""
    ended: RankExit | None = None
    others: tuple[RankExit, ...] = ()
    gone_s: float | None = None
    lost: bool = False
    left: bool = False


@dataclass(slots=True)
class RootState:
    """The root's state; one thread calls `handle`.

    Tasks are numbered from 0; the first rank of a task is its number times `ranks_per_task`. A
    report costs the same however many tasks there are: `_running` and `_connected` hold the numbers
    of the tasks for which the root still waits.
    """

    job: str
    run: str
    world_size: int  # number of tasks: with --nnodes that of the nodes, not of the ranks
    deadlines: Deadlines
    begin_s: float
    ranks_per_task: int = 1  # 1 under Slurm and mpirun, the ranks of a node with --nnodes
    noun: str = "rank"  # what messages call a task; with --nnodes "node"
    data_token: str = ""  # of the servers of the packs of --data
    folder: str = ""  # that the run writes, for tasks of other jobs
    phase: JobPhase = JobPhase.GATHERING
    started: bool = False
    reason: str = ""
    _tasks: dict[int, _Task] = field(default_factory=dict)  # by number
    _numbers: dict[Peer, int] = field(default_factory=dict)  # the task behind each connection
    _running: set[int] = field(default_factory=set)  # present, neither ended nor lost
    _connected: set[int] = field(default_factory=set)  # present, and still expects the run's result
    _lost: list[int] = field(default_factory=list)  # in order of time
    _missing: tuple[int, ...] = ()
    _starts: list[StartInfo] = field(default_factory=list)
    _asked_address: bool = False
    _stopped_s: float = 0.0
    _reported_end: bool = False
    _end: JobEnd | None = None
    _finished_s: float = 0.0
    _finished: bool = False

    def handle(self, event: RootEvent, now_s: float) -> list[RootAction]:
        """Return what to do about `event`, which happened at `now_s` of a monotonic clock."""
        match event:
            case Received():
                actions = self._on_report(event, now_s)
            case Disconnected():
                actions = self._on_disconnect(event.peer, now_s)
            case AddressChosen():
                actions = self._begin(event)
            case StopAsked():
                actions = self._on_end(0, event.ended, now_s)
            case ResultWritten():
                self._end, self.phase, self._finished_s = event.end, JobPhase.FINISHED, now_s
                actions = self._broadcast()
            case Tick():
                actions = self._on_tick(now_s)
        return actions + self._conclude(now_s)

    @property
    def present(self) -> tuple[int, ...]:
        """Numbers of the tasks that have arrived."""
        return tuple(sorted(self._tasks))

    def _on_report(self, received: Received, now_s: float) -> list[RootAction]:
        peer, report = received.peer, received.report
        refusal = self._refusal(report, now_s)
        if refusal:
            notice = Notice(run=self.run, phase=self.phase, refusal=refusal)
            return [SendNotice(peer, notice), Drop(peer)]
        task = self._tasks.get(report.rank)  # `rank` of a report is the task's number
        if task is None or task.report.task != report.task:
            task = self._tasks[report.rank] = _Task(report=report, peer=peer, heard_s=now_s)
            self._running.add(report.rank)
        task.peer, task.heard_s, task.gone_s = peer, now_s, None
        task.address = received.address or task.address
        self._numbers[peer] = report.rank
        task.left = task.left or report.leaving
        if task.left:
            self._connected.discard(report.rank)
        else:
            self._connected.add(report.rank)
        actions = self._on_end(report.rank, report.ended, now_s, report.others)
        actions.append(SendNotice(peer, self._notice(report.rank)))
        return actions

    def _on_end(
        self, number: int, ended: RankExit | None, now_s: float, others: tuple[RankExit, ...] = ()
    ) -> list[RootAction]:
        task = self._tasks.get(number)
        if task is None or task.lost or ended is None or not _advances(task.ended, ended):
            return []
        task.ended, task.others = ended, others
        self._running.discard(number)
        return self._stop(_stop_reason(ended), now_s) if ended.code else []

    def _refusal(self, report: TaskReport, now_s: float) -> str:
        if report.job != self.job:
            writes = f", which writes {self.folder}" if self.folder else ""
            return f"this is the root of another job: {self.job}{writes}"
        if report.run and report.run != self.run:
            return "this is the root of another run"
        if report.world_size != self.world_size or report.rank >= self.world_size:
            return f"this job has {self.world_size} {self.noun}s"
        task = self._tasks.get(report.rank)
        if task is None:
            # A task that arrives after another one failed, but before the start, is accepted: the
            # notice that it gets says that the job stops.
            return _TOO_LATE if self.started else ""
        if task.report.task == report.task:
            return ""
        if self.started:
            return _TOO_LATE
        silent_s = now_s - task.heard_s
        if task.gone_s is None and silent_s <= 2 * self.deadlines.heartbeat_interval_s:
            return f"another task is {self.noun} {report.rank} already"
        return ""  # the task was restarted before the run began

    def _on_disconnect(self, peer: Peer, now_s: float) -> list[RootAction]:
        number = self._numbers.pop(peer, None)
        if number is not None and self._tasks[number].peer == peer:  # else the task has reconnected
            self._tasks[number].gone_s = now_s
            self._connected.discard(number)
        return []

    def _begin(self, chosen: AddressChosen) -> list[RootAction]:
        if self.phase is not JobPhase.GATHERING:
            return []
        reports = [self._tasks[number].report for number in range(self.world_size)]
        # Tasks of a node that were not bound share its cores: task `index` of `count` takes its
        # part of them.
        shares = core_shares([(report.host, report.cores) for report in reports])
        addresses = [self._tasks[number].address for number in range(self.world_size)]
        data = data_starts(reports, addresses, chosen.address, self.data_token)
        self._starts = [
            StartInfo(
                address=chosen.address,
                port=chosen.port,
                share_index=index,
                share_count=count,
                data=served,
            )
            for (index, count), served in zip(shares, data, strict=True)
        ]
        self.phase, self.started = JobPhase.RUNNING, True
        return self._broadcast()

    def _on_tick(self, now_s: float) -> list[RootAction]:
        if self.phase is JobPhase.GATHERING:
            if now_s - self.begin_s <= self.deadlines.rendezvous_timeout_s:
                return []
            self._missing = tuple(
                number for number in range(self.world_size) if number not in self._tasks
            )
            missing = name_ranks(self._missing, self.noun)
            return self._stop(f"{missing} did not arrive in time", now_s)
        if not self.started or self.phase is JobPhase.FINISHED:
            return []
        lost = sorted(task for task in self._running if self._is_lost(self._tasks[task], now_s))
        for number in lost:
            self._tasks[number].lost = True
            self._lost.append(number)
            self._running.discard(number)
            self._connected.discard(number)
        names = name_ranks(lost, self.noun)
        return self._stop(f"{names} stopped reporting", now_s) if lost else []

    def _is_lost(self, task: _Task, now_s: float) -> bool:
        if self.phase is JobPhase.STOPPING:
            return now_s - self._stopped_s > self.deadlines.stop_timeout_s
        silent = now_s - task.heard_s > self.deadlines.heartbeat_timeout_s
        # Either the task is dead, or the network failed for a moment and the task will reconnect.
        gone = task.gone_s is not None and now_s - task.gone_s > self._reconnect_s
        return silent or gone

    @property
    def _reconnect_s(self) -> float:
        return self.deadlines.heartbeat_timeout_s / 3

    def _stop(self, reason: str, now_s: float) -> list[RootAction]:
        if self.phase >= JobPhase.STOPPING:
            return []
        self.phase, self.reason, self._stopped_s = JobPhase.STOPPING, reason, now_s
        return self._broadcast()

    def _conclude(self, now_s: float) -> list[RootAction]:
        """Return the actions that follow from the state, each once."""
        if self.phase is JobPhase.GATHERING:
            if len(self._tasks) < self.world_size or self._asked_address:
                return []
            self._asked_address = True
            return [ChooseAddress()]
        if self.phase is JobPhase.FINISHED:
            return self._finish(now_s)
        if self._reported_end or not self._is_over(now_s):
            return []
        self._reported_end = True
        exits = [
            ended
            for task in self._tasks.values()
            if task.ended
            for ended in (task.ended, *task.others)
        ]
        lost = [number * self.ranks_per_task for number in self._lost]  # the task's first rank
        return [AllEnded(explaining_exits(exits, lost), self._missing, self.present)]

    def _is_over(self, now_s: float) -> bool:
        if self.started:
            return not self._running
        late = now_s - self._stopped_s > self.deadlines.stop_timeout_s
        return late or bool(self._missing) or not self._running

    def _finish(self, now_s: float) -> list[RootAction]:
        if self._finished:
            return []
        late = now_s - self._finished_s > self.deadlines.stop_timeout_s
        if self._connected and not late:
            return []
        self._finished = True
        return [Finished()]

    def _broadcast(self) -> list[RootAction]:
        return [
            SendNotice(task.peer, self._notice(number))
            for number, task in self._tasks.items()
            if not task.left
        ]

    def _notice(self, number: int) -> Notice:
        return Notice(
            run=self.run,
            phase=self.phase,
            heard_end=self._tasks[number].ended is not None,
            start=self._starts[number] if self.started else None,
            end=self._end,
            reason=self.reason,
            heartbeat_interval_s=self.deadlines.heartbeat_interval_s,
            heartbeat_timeout_s=self.deadlines.heartbeat_timeout_s,
        )


def _advances(known: RankExit | None, reported: RankExit) -> bool:
    """Whether a report has news: a launcher may be interrupted after its rank has ended."""
    if known is None:
        return True
    return reported.outcome is ExitOutcome.INTERRUPTED and not known.code


def _stop_reason(ended: RankExit) -> str:
    if ended.outcome is ExitOutcome.INTERRUPTED:
        return f"rank {ended.rank} was interrupted by {ended.signal}"
    return f"rank {ended.rank} failed"
