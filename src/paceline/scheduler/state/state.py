"""What a scheduler knows: the jobs that wait and run, their progress, and the devices they hold.

A state changes by events and actions only, in place: a copy for each event would make a queue of
100,000 jobs slow. It holds no clock; the time is that of the last event. Equal sequences of events
give equal states, and `inputs` is a digest of that sequence: two decisions with the same digest had
the same inputs.

Progress is counted lazily: between two changes of its rate a job does rate x time units of work.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, UsageError
from paceline.scheduler.events import (
    Cancelled,
    Carried,
    DevicesBack,
    DevicesLost,
    Ended,
    Measured,
    NodeBack,
    NodeLost,
    Preempt,
    Rated,
    Refuse,
    Start,
    Started,
    Stopped,
    Submitted,
)
from paceline.scheduler.job import Job
from paceline.scheduler.placement import Placement, Shape
from paceline.scheduler.rates.corrected import Learner
from paceline.scheduler.state.inventory import Inventory, Parts, bits_of
from paceline.scheduler.state.mapping import in_rank_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.scheduler.cluster import Cluster
    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.rates.rates import Rates


@dataclass(slots=True)
class Slot:
    """Devices that are taken together, and the jobs on them: several if they share."""

    parts: Parts
    shape: Shape
    placement: Placement
    jobs: dict[str, JobState] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Fraction of each device for each of the jobs: all get the same."""
        return 1 / len(self.jobs)


@dataclass(slots=True, eq=False)
class JobState:
    """A job that waits or runs.

    Attributes:
        slot: where it runs; None while it waits.
        rate: estimated units of work per second at present; 0 while it waits.
        work_done, attained_s: units of work, and seconds times devices, up to `counted_s`.
        counted_s: up to when progress is counted; later than now while the job starts.
        waiting_since_s: when it was submitted or stopped last.
        waited_s: seconds that it waited before its last start, all waits together.
        starts: how often it was started.
        reason: why it stopped last, in words.
    """

    job: Job
    slot: Slot | None = None
    rate: float = 0.0
    work_done: float = 0.0
    attained_s: float = 0.0
    counted_s: float = 0.0
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    starts: int = 0
    reason: str = ""

    @property
    def running(self) -> bool:
        """Whether it holds devices."""
        return self.slot is not None

    @property
    def neighbours(self) -> list[Job]:
        """The jobs with which it shares its devices."""
        assert self.slot is not None
        return [other.job for other in self.slot.jobs.values() if other is not self]

    def count_until(self, now_s: float) -> None:
        """Count progress up to `now_s`."""
        if self.slot is not None and now_s > self.counted_s:
            passed_s = now_s - self.counted_s
            self.work_done += self.rate * passed_s
            self.attained_s += passed_s * self.slot.shape.devices / len(self.slot.jobs)
            self.counted_s = now_s

    def work_done_at(self, now_s: float) -> float:
        """Return units of work done, as estimated."""
        return self.work_done + self.rate * max(0.0, now_s - self.counted_s)

    def work_left(self, now_s: float) -> float | None:
        """Return units of work to do, as estimated; None if the job's work is not known."""
        if self.job.work is None:
            return None
        # A job that is still there has something left, whatever was estimated.
        return max(self.job.work - self.work_done_at(now_s), 1e-6 * self.job.work)

    def work_expected(self, now_s: float) -> float:
        """Return units of work to do; where they are not known, as many as are done.

        Run times in clusters have heavy tails: a job that has run for long runs for long again
        (Harchol-Balter and Downey, ACM TOCS 1997). One that has just begun is expected to end.
        """
        left = self.work_left(now_s)
        return self.work_done_at(now_s) if left is None else left


class State:
    """Jobs and devices of a queue, as the scheduler sees them.

    Attributes:
        cluster: all nodes, usable or not.
        rates: estimates of the jobs' rates.
        inventory: the free devices.
        waiting, running: by name; waiting jobs in the order in which they came or stopped.
        slots: taken devices, by their parts.
        now_s: time of the last event.
        data_nodes: by data set, nodes where a job that reads it ran: by index, in that order. The
            data may still be in the node's page cache or on its disk.
        learned: how often a report changed the rates noticeably.
        inputs: digest of all events and actions so far.
    """

    def __init__(self, cluster: Cluster, rates: Rates) -> None:
        self.cluster = cluster
        self.rates = rates
        self.inventory = Inventory(cluster)
        self.waiting: dict[str, JobState] = {}
        self.running: dict[str, JobState] = {}
        self.slots: dict[Parts, Slot] = {}
        self.data_nodes: dict[str, dict[int, None]] = {}
        self.now_s = 0.0
        self.learned = 0
        self._inputs = hashlib.blake2b(digest_size=16)

    @property
    def inputs(self) -> str:
        """Digest of all events and actions so far."""
        return self._inputs.hexdigest()

    def job(self, name: str) -> JobState | None:
        """Return a waiting or running job by name."""
        return self.waiting.get(name) or self.running.get(name)

    def apply(self, event: Event) -> None:
        """Change the state by an event.

        Events about jobs that are not in the queue change nothing: a cancellation and the end of a
        job may cross on their way.

        Raises:
            UsageError: a second job of one name was submitted, or events go back in time.
            ConfigError: the event names a node that the cluster lacks.
        """
        if event.at_s < self.now_s:
            raise UsageError(
                f"an event of {event.at_s} s came after one of {self.now_s} s",
                fix="Pass events in the order of their times",
            )
        self.now_s = event.at_s
        self._inputs.update(repr(event).encode())
        if isinstance(event, Submitted | Carried) and event.job.mesh:
            self._inputs.update(repr(event.job.mesh).encode())
        match event:
            case Submitted(job=job):
                self._submit(job)
            case Carried():
                self._carry(event)
            case Rated(profile=profile, alone=alone):
                self._give_rates(profile, alone)
            case Ended(name=name) | Cancelled(name=name):
                self._leave(name)
            case NodeLost() | NodeBack() | DevicesLost() | DevicesBack():
                self._change_devices(event)
            case Started() | Stopped() | Measured():
                if running := self.running.get(event.name):
                    self._report(running, event)

    def carried(self, name: str, at_s: float) -> Carried:
        """Return a job as one of the first events of a new log has it."""
        job = self.waiting.get(name) or self.running[name]
        return Carried(
            at_s=at_s,
            job=job.job,
            placement=None if job.slot is None else job.slot.placement,
            rate=job.rate,
            work_done=job.work_done,
            attained_s=job.attained_s,
            counted_s=job.counted_s,
            waiting_since_s=job.waiting_since_s,
            waited_s=job.waited_s,
            starts=job.starts,
            reason=job.reason,
        )

    def act(self, action: Action) -> None:
        """Change the state by an action that `decide` chose."""
        self._inputs.update(repr(action).encode())
        match action:
            case Start(name=name, placement=placement):
                self._start(self.waiting[name], self.inventory.parts(placement.parts))
            case Preempt(name=name, reason=reason):
                self._stop(self.running[name], reason)
            case Refuse(name=name):
                del self.waiting[name]

    def find(
        self, job: Job, device_type: str, count: int, *, max_level: int | None = None
    ) -> Parts | None:
        """Return free devices for a job, or None; see `Inventory.find`.

        Among equally good nodes, those that hold its data come first.
        """
        prefer = self.data_nodes.get(job.dataset, {})
        return self.inventory.find(device_type, count, max_level=max_level, prefer=prefer)

    def placement(self, job: Job, parts: Parts, *, jobs: int = 1) -> Placement:
        """Return the placement of a job on devices, in the order of its ranks.

        Args:
            job: that is to run there.
            parts: the devices.
            jobs: that share them, this one included: all get equal shares.
        """
        devices = self.inventory.devices(parts)
        if job.mesh:
            devices = in_rank_order(self.cluster, devices, job.mesh)
        return Placement(parts=devices, share=1 / jobs)

    def rate_of(self, job: JobState, shape: Shape, neighbours: Sequence[Job]) -> float:
        """Return the estimated rate of a job if it ran so."""
        rate = self.rates.alone(job.job, shape, job.work_done)
        return rate * self.rates.kept(job.job, neighbours, shape) if neighbours else rate

    def _submit(self, job: Job) -> None:
        if self.job(job.name):
            raise UsageError(
                f"a job named '{job.name}' is in the queue already",
                fix="Submit it under another name",
            )
        self.waiting[job.name] = JobState(job, waiting_since_s=self.now_s)

    def _carry(self, event: Carried) -> None:
        if self.job(event.job.name) is None:
            self.waiting[event.job.name] = JobState(event.job)
        job = self.waiting[event.job.name]
        if event.placement is not None:
            parts = self.inventory.parts(event.placement.parts)
            others = self.slots[parts].jobs.values() if parts in self.slots else ()
            rates = [(other, other.rate) for other in others]
            self._start(job, parts)
            for carried, rate in (*rates, (job, event.rate)):
                carried.rate = rate
        job.work_done, job.attained_s = event.work_done, event.attained_s
        job.counted_s = event.counted_s
        job.waiting_since_s, job.waited_s = event.waiting_since_s, event.waited_s
        job.starts, job.reason = event.starts, event.reason

    def _give_rates(self, profile: str, alone: Mapping[str, Mapping[str, float]]) -> None:
        if not isinstance(self.rates, Learner):
            return
        by_count = {
            device_type: {int(count): rate for count, rate in rates.items()}
            for device_type, rates in alone.items()
        }
        self.learned += self.rates.give(profile, by_count)

    def _report(self, job: JobState, event: Started | Stopped | Measured) -> None:
        match event:
            case Started():
                job.counted_s = self.now_s
            case Stopped(work_done=work_done, reason=reason):
                self._stop(job, reason)
                if work_done is not None:
                    job.work_done = work_done
            case Measured(work_done=work_done, rate=rate):
                job.count_until(self.now_s)
                job.work_done = work_done
                if rate is not None:
                    job.rate = rate
                    self._learn(job, rate)

    def _learn(self, job: JobState, rate: float) -> None:
        slot = job.slot
        if slot is not None and isinstance(self.rates, Learner):
            self.learned += self.rates.observe(
                job.job, job.neighbours, slot.shape, rate, job.work_done
            )

    def _start(self, job: JobState, parts: Parts) -> None:
        slot = self.slots.get(parts)
        if slot is None:
            self.inventory.take(parts)
            devices = self.inventory.devices(parts)
            slot = Slot(parts, self.inventory.shape(parts), Placement(parts=devices))
            self.slots[parts] = slot
        if job.job.dataset:
            nodes = self.data_nodes.setdefault(job.job.dataset, {})
            nodes.update(dict.fromkeys(index for index, _ in parts))
        for neighbour in slot.jobs.values():
            neighbour.count_until(self.now_s)
        del self.waiting[job.job.name]
        self.running[job.job.name] = job
        slot.jobs[job.job.name] = job
        job.slot = slot
        job.waited_s += self.now_s - job.waiting_since_s
        job.counted_s = self.now_s + (job.job.restart_s if job.starts else job.job.start_s)
        job.starts += 1
        self._set_rates(slot)

    def _stop(self, job: JobState, reason: str) -> None:
        self._release(job)
        job.waiting_since_s = self.now_s
        job.reason = reason
        self.waiting[job.job.name] = job

    def _leave(self, name: str) -> None:
        self.waiting.pop(name, None)
        if running := self.running.get(name):
            self._release(running)

    def _release(self, job: JobState) -> None:
        slot = job.slot
        assert slot is not None
        for member in slot.jobs.values():
            member.count_until(self.now_s)
        del slot.jobs[job.job.name]
        del self.running[job.job.name]
        job.slot, job.rate = None, 0.0
        if slot.jobs:
            self._set_rates(slot)
        else:
            del self.slots[slot.parts]
            self.inventory.give_back(slot.parts)

    def _set_rates(self, slot: Slot) -> None:
        for job in slot.jobs.values():
            job.rate = self.rate_of(job, slot.shape, job.neighbours if len(slot.jobs) > 1 else ())

    def _change_devices(self, event: NodeLost | NodeBack | DevicesLost | DevicesBack) -> None:
        index = self._node_index(event.node)
        match event:
            case NodeLost():
                self._lose(index)
            case NodeBack():
                self._restore(index)
            case DevicesLost(devices=devices, reason=reason):
                self._lose_devices(index, bits_of(devices), reason)
            case DevicesBack(devices=devices):
                found = bits_of(devices) & self.inventory.lost_bits[index]
                self.inventory.restore_devices(index, found)

    def _lose(self, index: int) -> None:
        if index in self.inventory.lost:
            return
        holders = [slot for parts, slot in self.slots.items() if index in dict(parts)]
        for slot in holders:
            for job in list(slot.jobs.values()):
                self._stop(job, f"node {self.cluster.nodes[index].name} was lost")
        self.inventory.remove(index)
        for nodes in self.data_nodes.values():
            nodes.pop(index, None)

    def _lose_devices(self, index: int, bits: int, reason: str) -> None:
        bits &= ~self.inventory.lost_bits[index]
        holders = [slot for parts, slot in self.slots.items() if dict(parts).get(index, 0) & bits]
        for slot in holders:
            for job in list(slot.jobs.values()):
                self._stop(job, reason)
        self.inventory.remove_devices(index, bits)

    def _restore(self, index: int) -> None:
        if index in self.inventory.lost:
            self.inventory.restore(index)

    def _node_index(self, name: str) -> int:
        try:
            return self.inventory.index[name]
        except KeyError:
            raise ConfigError(
                f"the cluster has no node '{name}'",
                fix="Name one of: " + ", ".join(list(self.inventory.index)[:8]),
            ) from None
