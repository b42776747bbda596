"""The simulator: plays jobs, failures and true rates against a policy, event by event.

    heap of (time, kind, what)  -->  decide(policy, state, events of one instant)  -->  actions
           ^                                                                              |
           +--- ends of jobs, by their true rates; the policy's timer; reports  <---------+

The scheduler's state holds what events reported. The world here knows the true rates and the true
work of each job, which may differ: that is how errors of estimates are simulated. A job's progress
is computed when its rate changes, never by time steps, so the cost is that of the events.

A job pays `start_s` or `restart_s` each time it starts: it holds its devices and makes no progress.
A job on a lost node goes on from its last checkpoint, at most `checkpoint_s` of progress back.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from paceline.scheduler.cluster import Cluster
from paceline.scheduler.decide import Decision, decide
from paceline.scheduler.events import (
    Ended,
    Event,
    Measured,
    NodeBack,
    NodeLost,
    Preempt,
    Refuse,
    Start,
    Stopped,
    Submitted,
    Timer,
)
from paceline.scheduler.job import Job
from paceline.scheduler.placement import Shape
from paceline.scheduler.rates.rates import Rates
from paceline.scheduler.state.inventory import Parts
from paceline.scheduler.state.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.scheduler.decide import Policy


# Within an instant, ends come first, so that their devices are free for what follows.
_CHANGE, _RESTORE, _LOSE, _SUBMIT, _TIMER = range(5)
_REACHED = 1e-9  # share of its work within which a job has reached its end
_Play: TypeAlias = "Callable[..., Iterable[Event]]"


class NodeFailure(NamedTuple):
    """A node is lost for a while."""

    node: str
    at_s: float
    for_s: float


class Span(NamedTuple):
    """A time in which a job held devices.

    Attributes:
        name: of the job.
        begin_s, end_s: from its start to its end or stop.
        parts: its devices.
        jobs: on these devices when it left them, itself included.
    """

    name: str
    begin_s: float
    end_s: float
    parts: Parts
    jobs: int


@dataclass(slots=True)
class JobOutcome:
    """What became of a job.

    Attributes:
        job: as submitted, with its true work.
        started_s, ended_s: first start and end; None if it never came to that.
        starts: how often it was started.
        work_done: units of work up to its last stop.
        held_s: seconds times devices that it held, shared devices divided by their jobs.
        refused: why it was refused, in words.
    """

    job: Job
    started_s: float | None = None
    ended_s: float | None = None
    starts: int = 0
    work_done: float = 0.0
    held_s: float = 0.0
    refused: str = ""


@dataclass(slots=True)
class QueueOutcome:
    """What a simulation came to; `metrics` makes figures of it."""

    policy: str
    cluster: Cluster
    jobs: dict[str, JobOutcome]
    decisions: list[Decision]
    spans: list[Span]
    events: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What is true in a simulation.

    Attributes:
        jobs: with their true work, in any order.
        cluster: all nodes.
        rates: true rates.
        failures: of nodes.
        checkpoint_s: progress that a job on a lost node loses at most.
        told: the job as the scheduler gets it: with another work than the true one, or none.
        report_s: how often a running job reports its progress; 0: only when its rate changes by
            itself.
    """

    jobs: Sequence[Job]
    cluster: Cluster
    rates: Rates
    failures: Sequence[NodeFailure] = ()
    checkpoint_s: float = 600.0
    told: Callable[[Job], Job] = lambda job: job
    report_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Running:
    """The truth about a running job."""

    job: Job
    parts: Parts
    shape: Shape
    began_s: float
    counted_s: float
    work_done: float
    held_from_s: float = 0.0
    sharers: int = 1
    rate: float = 0.0
    version: int = 0  # of the rate: an end that was computed with an older one does not count

    def __post_init__(self) -> None:
        self.held_from_s = self.began_s


class Simulation:
    """One run of a policy in a world."""

    def __init__(self, world: World, policy: Policy, rates: Rates, *, log: bool = True) -> None:
        """Prepare a run.

        Args:
            world: what is true.
            policy: decides.
            rates: what the scheduler believes of rates; may be `world.rates`.
            log: keep decisions and spans.
        """
        self.world = world
        self.policy = policy
        self.state = State(world.cluster, rates)
        self.outcome = QueueOutcome(policy.name, world.cluster, {}, [], [])
        self._log = log
        self._heap: list[tuple[float, int, int, _Play, tuple[object, ...]]] = []
        self._order = itertools.count()
        self._running: dict[str, _Running] = {}
        self._on: dict[Parts, dict[str, _Running]] = {}
        self._timer_s: float | None = None
        self._left = len(world.jobs)
        for job in world.jobs:
            self.outcome.jobs[job.name] = JobOutcome(job)
            self._push(job.submitted_s, _SUBMIT, self._submit, job)
        for failure in world.failures:
            self._push(failure.at_s, _LOSE, self._lose, failure.node)
            self._push(failure.at_s + failure.for_s, _RESTORE, self._restore, failure.node)

    @property
    def jobs_left(self) -> int:
        """Jobs that have not ended."""
        return self._left

    @property
    def now_s(self) -> float:
        """The time of the simulation."""
        return self.state.now_s

    def run(self, *, progress: Callable[[Simulation], None] | None = None) -> QueueOutcome:
        """Run to the end of the last job and return what came of all.

        Args:
            progress: called after each instant.
        """
        while self._left and self._heap:
            self.step()
            if progress is not None:
                progress(self)
        return self.outcome

    def step(self) -> None:
        """Play the events of the next instant."""
        now_s = self._heap[0][0]
        events: list[Event] = []
        while self._heap and self._heap[0][0] == now_s:
            *_, play, what = heapq.heappop(self._heap)
            events.extend(play(now_s, *what))
        if not events:
            return  # superseded by a change of rates
        self.outcome.events += len(events)
        decisions = decide(self.policy, self.state, events)
        for decision in decisions:
            self._carry_out(decision, now_s)
        if self._log:
            self.outcome.decisions.extend(decisions)
        self._set_timer(now_s)

    def _push(self, at_s: float, rank: int, play: _Play, *what: object) -> None:
        heapq.heappush(self._heap, (at_s, rank, next(self._order), play, what))

    def _set_timer(self, now_s: float) -> None:
        wake_s = self.policy.wake_s(self.state)
        if (
            wake_s is not None
            and wake_s > now_s
            and (self._timer_s is None or self._timer_s <= now_s or wake_s < self._timer_s)
        ):
            self._timer_s = wake_s
            self._push(wake_s, _TIMER, self._timer)

    # Events, by kind. Within an instant: ends first, so that their devices are free.

    def _submit(self, now_s: float, job: Job) -> Iterable[Event]:
        yield Submitted(at_s=now_s, job=self.world.told(job))

    def _change(self, now_s: float, running: _Running, version: int) -> Iterable[Event]:
        """The end of a running job, or a change of its rate by its progress, or a report."""
        if running.version != version:
            return
        self._count(running, now_s)
        job = running.job
        assert job.work is not None
        if running.work_done >= job.work * (1 - _REACHED):
            self._remove(running, now_s)
            outcome = self.outcome.jobs[job.name]
            outcome.ended_s = now_s
            self._left -= 1
            yield Ended(at_s=now_s, name=job.name)
        else:
            on = self._on[running.parts]
            self._set_rate(running, [r.job for r in on.values() if r is not running])
            yield Measured(
                at_s=now_s, name=job.name, work_done=running.work_done, rate=running.rate
            )

    def _lose(self, now_s: float, node: str) -> Iterable[Event]:
        index = self.state.inventory.index[node]
        for running in [r for r in self._running.values() if index in dict(r.parts)]:
            self._count(running, now_s)
            lost_s = min(now_s - running.began_s, self.world.checkpoint_s)
            running.work_done = max(0.0, running.work_done - lost_s * running.rate)
            self._remove(running, now_s)
            yield Stopped(
                at_s=now_s,
                name=running.job.name,
                work_done=running.work_done,
                reason=f"node {node} was lost",
            )
        yield NodeLost(at_s=now_s, node=node)

    def _restore(self, now_s: float, node: str) -> Iterable[Event]:
        yield NodeBack(at_s=now_s, node=node)

    def _timer(self, now_s: float) -> Iterable[Event]:
        yield Timer(at_s=now_s)

    # Actions, and what they change in the world.

    def _carry_out(self, decision: Decision, now_s: float) -> None:
        match decision.action:
            case Start(name=name, placement=placement):
                self._start(name, self.state.inventory.parts(placement.parts), now_s)
            case Preempt(name=name):
                running = self._running[name]
                self._count(running, now_s)
                self._remove(running, now_s)
            case Refuse(name=name, reason=reason):
                self.outcome.jobs[name].refused = reason
                self._left -= 1

    def _start(self, name: str, parts: Parts, now_s: float) -> None:
        outcome = self.outcome.jobs[name]
        job = outcome.job
        delay_s = job.restart_s if outcome.starts else job.start_s
        if outcome.started_s is None:
            outcome.started_s = now_s
        outcome.starts += 1
        running = _Running(
            job=job,
            parts=parts,
            shape=self.state.inventory.shape(parts),
            began_s=now_s,
            counted_s=now_s + delay_s,
            work_done=outcome.work_done,
        )
        self._running[name] = running
        self._on.setdefault(parts, {})[name] = running
        self._refresh(parts, now_s)

    def _remove(self, running: _Running, now_s: float) -> None:
        """Take a running job off its devices; its progress is counted already."""
        name = running.job.name
        running.version += 1
        outcome = self.outcome.jobs[name]
        outcome.work_done = running.work_done
        del self._running[name]
        on = self._on[running.parts]
        if self._log:
            self.outcome.spans.append(Span(name, running.began_s, now_s, running.parts, len(on)))
        del on[name]
        if on:
            self._refresh(running.parts, now_s)
        else:
            del self._on[running.parts]

    def _refresh(self, parts: Parts, now_s: float) -> None:
        """Set the rates of all jobs on some devices, after one came or left."""
        on = self._on[parts]
        for running in on.values():
            self._count(running, now_s)
            self._set_rate(running, [r.job for r in on.values() if r is not running])

    def _count(self, running: _Running, now_s: float) -> None:
        """Count progress up to now, at the rate so far."""
        outcome = self.outcome.jobs[running.job.name]
        held_s = now_s - running.held_from_s
        outcome.held_s += held_s * running.shape.devices / running.sharers
        running.held_from_s = now_s
        if now_s > running.counted_s:
            running.work_done += running.rate * (now_s - running.counted_s)
            running.counted_s = now_s

    def _set_rate(self, running: _Running, neighbours: Sequence[Job]) -> None:
        """Set the true rate, and the moment at which it changes or the job ends."""
        rates, job = self.world.rates, running.job
        assert job.work is not None
        rate = rates.alone(job, running.shape, running.work_done)
        running.rate = rate * rates.kept(job, neighbours, running.shape) if neighbours else rate
        running.sharers = len(neighbours) + 1
        running.version += 1
        if running.rate <= 0:
            return  # it stays until the scheduler stops it
        until = min(job.work, rates.constant_until(job, running.work_done))
        at_s = running.counted_s + max(0.0, until - running.work_done) / running.rate
        if self.world.report_s:
            at_s = min(at_s, running.counted_s + self.world.report_s)
        if at_s <= running.counted_s and until - running.work_done > _REACHED * job.work:
            # Late in a long queue the clock does not resolve what is left of a short job.
            at_s = math.nextafter(running.counted_s, math.inf)
        self._push(at_s, _CHANGE, self._change, running, running.version)
