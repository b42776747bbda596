"""A network in memory under a virtual clock: messages are lost, repeated and late, by a seed.

Tests and simulations run the same state machines over this network that `server` and `client` run
over sockets and files. Nothing here waits: time jumps from one event to the next.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.randomness import make_generator
from paceline.launch.exits import exit_of
from paceline.launch.rendezvous.member import (
    Connect,
    Hangup,
    Leave,
    LinkDown,
    LinkUp,
    MemberState,
    Noticed,
    RankEnded,
    SendReport,
    StartRank,
    StopRank,
)
from paceline.launch.rendezvous.messages import TaskReport, parse_notice, parse_report
from paceline.launch.rendezvous.root import (
    AddressChosen,
    AllEnded,
    ChooseAddress,
    Deadlines,
    Disconnected,
    Drop,
    Finished,
    Received,
    RootState,
    SendNotice,
    Tick,
)

if TYPE_CHECKING:
    from paceline.launch.rendezvous.member import MemberAction, MemberEvent
    from paceline.launch.rendezvous.root import RootAction, RootEvent

ROOT_TICK_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFaults:
    """Faults of the network; probabilities per message.

    Attributes:
        loss: it never arrives.
        repetition: it arrives twice.
        delay_s: the most that it takes; later ones overtake it.
        break_s: mean seconds between breaks of a connection; 0 = never.
    """

    loss: float = 0.0
    repetition: float = 0.0
    delay_s: float = 0.001
    break_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedPeer:
    """A connection of the task with this index; links are numbered from 1, 0 is none."""

    index: int
    link: int


@dataclass(slots=True)
class SimulatedTask:
    """A member on the network, and how it ended."""

    index: int
    state: MemberState
    alive: bool = True
    linked: int = 0  # number of its connection; 0 = none
    started_s: float | None = None
    ended: bool = False
    stop_reason: str = ""
    leave: Leave | None = None
    run_s: float = 1.0  # how long its rank runs
    code: int = 0


@dataclass(slots=True)
class SimulatedJob:
    """One root and its members; `run` plays until all have left or time is over.

    Attributes:
        root_messages: number of messages that the root received or sent, by second.
    """

    world_size: int
    deadlines: Deadlines
    seed: int = 0
    faults: NetworkFaults = field(default_factory=NetworkFaults)
    job: str = "job"
    now_s: float = 0.0
    tasks: list[SimulatedTask] = field(default_factory=list)
    root: RootState | None = None
    outcome: AllEnded | None = None
    finished: bool = False
    root_messages: dict[int, int] = field(default_factory=dict)
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _links: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _dice: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._dice = make_generator(self.seed, "network")

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Have `action` done at a time."""
        heapq.heappush(self._queue, (max(when_s, self.now_s), next(self._order), action))

    def start_root(self, run: str = "run-1") -> None:
        """Start the root now, or a new one in place of a dead one."""
        self.root = RootState(
            job=self.job,
            run=run,
            world_size=self.world_size,
            deadlines=self.deadlines,
            begin_s=self.now_s,
        )
        self._tick_root(self.root)

    def kill_root(self) -> None:
        """End the root's process: all connections break."""
        self.root = None
        for task in self.tasks:
            if task.linked:
                self._break(task, task.linked)

    @property
    def tasks_by_rank(self) -> dict[int, SimulatedTask]:
        """The latest task of each rank."""
        return {task.state.identity.rank: task for task in self.tasks}

    def add_task(self, rank: int, *, name: str = "", run_s: float = 1.0, code: int = 0) -> int:
        """Start a task now; return its index. Several may claim the same rank."""
        identity = TaskReport(
            job=self.job,
            run="",
            task=name or f"task-{len(self.tasks)}",
            rank=rank,
            world_size=self.world_size,
            host=f"node-{rank // 4}",
            cores=tuple(range(8)),
        )
        state = MemberState(identity=identity, deadlines=self.deadlines, begin_s=self.now_s)
        task = SimulatedTask(index=len(self.tasks), state=state, run_s=run_s, code=code)
        self.tasks.append(task)
        self._tick_member(task)
        return len(self.tasks) - 1

    def kill_task(self, index: int) -> None:
        """End a task's process: it says nothing any more, and its connection breaks."""
        task = self.tasks[index]
        task.alive = False
        if task.linked:
            self._break(task, task.linked)

    def run(self, until_s: float) -> None:
        """Play until all tasks have left or are dead, or until `until_s`."""
        while self._queue and self._queue[0][0] <= until_s:
            if self._is_over():
                return
            self.now_s, _, action = heapq.heappop(self._queue)
            action()

    def _is_over(self) -> bool:
        if not (self.finished or self.root is None):
            return False
        return bool(self.tasks) and all(task.leave or not task.alive for task in self.tasks)

    # --- the root's shell -----------------------------------------------------------------------

    def root_event(self, event: RootEvent) -> None:
        """Give the root an event now."""
        if self.root is not None:
            self._do_root(self.root.handle(event, self.now_s))

    def _do_root(self, actions: list[RootAction]) -> None:
        for action in actions:
            match action:
                case SendNotice():
                    self._count_message()
                    assert isinstance(action.peer, SimulatedPeer)
                    self._carry(action.peer, action.notice.to_line(), to_root=False)
                case Drop():
                    assert isinstance(action.peer, SimulatedPeer)
                    self._drop(action.peer)
                case ChooseAddress():
                    self.at(self.now_s, lambda: self.root_event(AddressChosen("node-0", 4711)))
                case AllEnded():
                    self.outcome = action
                case Finished():
                    self.finished = True

    def _tick_root(self, root: RootState) -> None:
        if self.root is root and not self.finished:
            self.root_event(Tick())
            self.at(self.now_s + ROOT_TICK_S, lambda: self._tick_root(root))

    def _count_message(self) -> None:
        second = int(self.now_s)
        self.root_messages[second] = self.root_messages.get(second, 0) + 1

    # --- the members' shells --------------------------------------------------------------------

    def member_event(self, task: SimulatedTask, event: MemberEvent) -> None:
        """Give a member an event now."""
        if task.alive:
            self._do_member(task, task.state.handle(event, self.now_s))

    def _do_member(self, task: SimulatedTask, actions: list[MemberAction]) -> None:
        for action in actions:
            match action:
                case Connect():
                    self.at(self.now_s + 0.001, lambda: self._connect(task))
                case SendReport():
                    self._carry(
                        SimulatedPeer(task.index, task.linked),
                        action.report.to_line(),
                        to_root=True,
                    )
                case Hangup():
                    task.linked = 0
                case StartRank():
                    task.started_s = self.now_s
                    self.at(self.now_s + task.run_s, lambda: self.end_rank(task, task.code))
                case StopRank():
                    task.stop_reason = action.reason
                    self.at(self.now_s + 0.1, lambda: self.end_rank(task, 1, stopped=True))
                case Leave():
                    task.leave = action

    def end_rank(self, task: SimulatedTask, code: int, *, stopped: bool = False) -> None:
        """End the rank of a task, unless it has ended."""
        if not task.ended:
            task.ended = True
            rank = task.state.identity.rank
            ended = exit_of(rank, code, stopped=stopped, at_s=self.now_s)
            self.member_event(task, RankEnded(ended))

    def _tick_member(self, task: SimulatedTask) -> None:
        if task.alive and task.leave is None:
            self.member_event(task, Tick())
            due_s = min(task.state.wakeup_s(), self.now_s + 1.0)
            self.at(max(due_s, self.now_s + 0.01), lambda: self._tick_member(task))

    def _connect(self, task: SimulatedTask) -> None:
        if not task.alive:
            return
        if self.root is None or self.finished:
            self.member_event(task, LinkDown())
            return
        task.linked = link = next(self._links)
        if self.faults.break_s:
            after_s = float(self._dice.exponential(self.faults.break_s))
            self.at(self.now_s + after_s, lambda: self._break(task, link))
        self.member_event(task, LinkUp())

    def _break(self, task: SimulatedTask, link: int) -> None:
        if task.linked != link:
            return
        task.linked = 0
        self.root_event(Disconnected(SimulatedPeer(task.index, link)))
        self.member_event(task, LinkDown())

    # --- the wire -------------------------------------------------------------------------------

    def _carry(self, peer: SimulatedPeer, line: bytes, *, to_root: bool) -> None:
        if not peer.link or self._dice.random() < self.faults.loss:
            return
        copies = 2 if self._dice.random() < self.faults.repetition else 1
        for _ in range(copies):
            arrival_s = self.now_s + float(self._dice.uniform(0, self.faults.delay_s))
            self.at(arrival_s, lambda: self._deliver(peer, line, to_root=to_root))

    def _deliver(self, peer: SimulatedPeer, line: bytes, *, to_root: bool) -> None:
        task = self.tasks[peer.index]
        if to_root:
            self._count_message()
            self.root_event(Received(peer, parse_report(line)))
        elif task.linked == peer.link:
            self.member_event(task, Noticed(parse_notice(line)))

    def _drop(self, peer: SimulatedPeer) -> None:
        task = self.tasks[peer.index]
        self.at(self.now_s + self.faults.delay_s, lambda: self._break(task, peer.link))
