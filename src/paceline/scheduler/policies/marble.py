"""The number of devices at which they still pay, several jobs to a node (MARBLE).

On one node a training scales sub-linearly. MARBLE measures its rate X(g) on g = 1, 2, ... devices
of a node and gives it no more than pay, so that several jobs share the node::

    knee    g* = largest g with (X(g) - X(g - 1)) / X(1) >= theta
    queue   first in, first out: g* devices of the fullest node that has them, else the largest
            number that some node has; else the job waits, and those behind it with it
    rest    while nobody waits, free devices go one by one to the running job of their node with
            the largest (X(g + 1) - X(g)) / work left; a job is resized, by checkpoint and restart,
            if that saves more than twice the restart
    back    jobs that were given more than g* return to it where the head of the queue then gets
            more devices, up to its own g*

At the limit theta -> 1 every job has one device; at theta = 0 all that it may use. In the mode
`share` a job that finds no devices runs on those of another one too, where the estimated rates
relative to alone sum to more than `pays` and each keeps `least`.
The knee and the sharing of nodes are published, the queue and the resizing are a reconstruction.
Source: J. Han, M. Rafique, L. Xu, A. Butt, S. Lim, S. Vazhkudai, MARBLE: A Multi-GPU Aware Job
Scheduler for Deep Learning on HPC Systems, CCGrid 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.scheduler.events import Preempt, Start
from paceline.scheduler.placement import Shape
from paceline.scheduler.policies.fitting import (
    Fit,
    allowed_types,
    join,
    memory_suffices,
    refuse_unfit,
    start,
)
from paceline.scheduler.rates.curve import knee
from paceline.scheduler.state.inventory import lowest_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.inventory import Parts
    from paceline.scheduler.state.state import JobState, Slot, State


@dataclass(frozen=True, slots=True)
class Marble:
    """Jobs share nodes, each with the devices that pay.

    Attributes:
        theta: gain of a device, relative to the rate on one, that still pays.
        share: several jobs may run on one device.
        pays: sum of the shares of their rates that jobs keep, above which they share.
        least: share of its rate that each of them keeps at least.
        most: jobs on one set of devices.
    """

    theta: float = 0.5
    share: bool = False
    pays: float = 1.1
    least: float = 0.5
    most: int = 2

    @property
    def name(self) -> str:
        """``marble-share`` if devices are shared, else ``marble``."""
        return "marble-share" if self.share else "marble"

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield starts of the queue's head, then the use of what is left."""
        yield from refuse_unfit(state, events)
        while state.waiting:
            head = next(iter(state.waiting.values()))
            fit = self._fit(state, head)
            if back := self._back(state, head, fit):
                yield from back
                continue
            if fit is None:
                break
            yield start(state, head, fit, reason=self._words(state, head, fit))
        if state.waiting and self.share:
            yield from self._share(state)
        if not state.waiting:
            yield from self._part(state)
            yield from self._grow(state)

    def wake_s(self, state: State) -> float | None:
        """Return None: only events matter."""
        return None

    def explain(self, state: State, job: JobState) -> str:
        """Return the number of devices at which they pay for a job, in words."""
        knees = {kind: self.knee(state, job, kind) for kind in allowed_types(state, job.job)}
        return "it pays on " + " or ".join(f"{count} {kind}" for kind, count in knees.items())

    def knee(self, state: State, job: JobState, device_type: str) -> int:
        """Return g* of a job on one node of a type, within its own limits."""
        low, high = job.job.limits
        size = state.inventory.largest_node[device_type]
        rates = [
            state.rates.alone(job.job, Shape(device_type, (devices,), 0), job.work_done)
            for devices in range(1, min(high, size) + 1)
        ]
        return max(low, knee(rates, self.theta))

    def _fit(self, state: State, job: JobState) -> Fit | None:
        """Return the devices of a node, at most g*, on which a waiting job runs fastest."""
        low, _ = job.job.limits
        best: Fit | None = None
        for kind in allowed_types(state, job.job):
            wanted = min(self.knee(state, job, kind), max(low, state.inventory.largest_free(kind)))
            one_node = low <= state.inventory.largest_node[kind]
            parts = state.find(job.job, kind, wanted, max_level=0 if one_node else None)
            if parts is None:
                continue
            shape = state.inventory.shape(parts)
            rate = state.rates.alone(job.job, shape, job.work_done)
            if rate > 0 and (best is None or rate > best.rate):
                best = Fit(rate, parts, shape)
        return best

    def _words(self, state: State, job: JobState, fit: Fit) -> str:
        paying = self.knee(state, job, fit.shape.device_type)
        if fit.shape.devices < paying:
            return f"{paying} devices would pay, {fit.shape.devices} are free on one node"
        return f"{paying} devices pay"

    def _back(self, state: State, head: JobState, fit: Fit | None) -> list[Action]:
        """Return what shrinks a job to g* so that the head of the queue gets more; may be empty.

        Args:
            state: may be read only.
            head: of the queue.
            fit: devices that it would get now.
        """
        kinds = {kind: self.knee(state, head, kind) for kind in allowed_types(state, head.job)}
        if fit is not None and fit.shape.devices >= kinds[fit.shape.device_type]:
            return []
        most, shrunk = fit.shape.devices if fit else head.job.limits[0] - 1, None
        for job in state.running.values():
            slot = job.slot
            if slot is None or not self._resizable(job) or slot.shape.device_type not in kinds:
                continue
            ((index, bits),) = slot.parts
            paying = self.knee(state, job, slot.shape.device_type)
            spare = bits.bit_count() - paying
            free = state.inventory.free_bits[index].bit_count()
            devices = min(free + spare, kinds[slot.shape.device_type])
            if spare > 0 and devices > most:
                most, shrunk = devices, (job, ((index, lowest_bits(bits, paying)),), paying)
        if shrunk is None:
            return []
        job, kept, paying = shrunk
        return self._resize(state, job, kept, f"{head.job.name} waits, and {paying} pay")

    def _resizable(self, job: JobState) -> bool:
        slot = job.slot
        return (
            slot is not None
            and job.job.elastic
            and job.job.preemptible
            and len(slot.parts) == 1
            and len(slot.jobs) == 1
        )

    def _resize(self, state: State, job: JobState, parts: Parts, reason: str) -> list[Action]:
        placement = state.placement(job.job, parts)
        name = job.job.name
        return [
            Preempt(name=name, reason=f"it is resized: {reason}"),
            Start(name=name, placement=placement, reason=reason),
        ]

    def _grow(self, state: State) -> Iterator[Action]:
        """Give free devices to the jobs of their node; each job is resized once."""
        free = {index: bits for index, bits in enumerate(state.inventory.free_bits) if bits}
        sizes = {
            job: job.slot.shape.devices
            for job in state.running.values()
            if job.slot is not None and self._resizable(job) and job.slot.parts[0][0] in free
        }
        left = {index: bits.bit_count() for index, bits in free.items()}
        grown = dict(sizes)
        while True:
            gain, job = max(
                ((self._gain(state, job, grown[job], left), job) for job in sizes),
                key=lambda entry: entry[0],
                default=(0.0, None),
            )
            if gain <= 0 or job is None or job.slot is None:
                break
            grown[job] += 1
            left[job.slot.parts[0][0]] -= 1
        for job, devices in grown.items():
            if devices > sizes[job] and self._saves(state, job, sizes[job], devices):
                assert job.slot is not None
                ((index, bits),) = job.slot.parts
                more = lowest_bits(state.inventory.free_bits[index], devices - sizes[job])
                yield from self._resize(
                    state, job, ((index, bits | more),), "nobody waits for the free devices"
                )

    def _gain(self, state: State, job: JobState, devices: int, left: dict[int, int]) -> float:
        assert job.slot is not None
        if devices >= job.job.limits[1] or not left.get(job.slot.parts[0][0]):
            return 0.0
        gain = self._rate(state, job, devices + 1) - self._rate(state, job, devices)
        return gain / (job.work_left(state.now_s) or 1.0)

    def _saves(self, state: State, job: JobState, devices: int, more: int) -> bool:
        left = job.work_expected(state.now_s)
        before, after = self._rate(state, job, devices), self._rate(state, job, more)
        return left / before - left / after > 2 * job.job.restart_s

    def _rate(self, state: State, job: JobState, devices: int) -> float:
        assert job.slot is not None
        shape = Shape(job.slot.shape.device_type, (devices,), 0)
        return state.rates.alone(job.job, shape, job.work_done)

    def _share(self, state: State) -> Iterator[Action]:
        """Start waiting jobs beside running ones, where that pays."""
        for job in list(state.waiting.values()):
            best, slot = max(
                ((self._total(state, job, slot), slot) for slot in state.slots.values()),
                key=lambda entry: entry[0],
                default=(0.0, None),
            )
            if slot is not None and best > self.pays:
                others = ", ".join(slot.jobs)
                reason = f"with {others} it keeps a total of {best:.2f} of the rates alone"
                yield join(state, job, slot, reason=reason)

    def _total(self, state: State, job: JobState, slot: Slot) -> float:
        """Return the sum of the shares that jobs keep if one more joins; 0: they must not."""
        low, high = job.job.limits
        shape = slot.shape
        members = [*slot.jobs.values(), job]
        if not low <= shape.devices <= high or len(members) > self.most:
            return 0.0
        if shape.device_type not in allowed_types(state, job.job) or not memory_suffices(
            state, [member.job for member in members], shape.device_type
        ):
            return 0.0
        if state.rates.alone(job.job, shape, job.work_done) <= 0:
            return 0.0
        if not all(member.job.shares for member in members):
            return 0.0
        kept = [
            state.rates.kept(
                member.job, [other.job for other in members if other is not member], shape
            )
            for member in members
        ]
        return sum(kept) if min(kept) >= self.least else 0.0

    def _part(self, state: State) -> Iterator[Action]:
        """Give jobs that share devices of their own, where some are free and that saves time."""
        for slot in list(state.slots.values()):
            *_, job = slot.jobs.values()
            if len(slot.jobs) < 2 or not job.job.preemptible:
                continue
            fit = self._fit(state, job)
            left = job.work_expected(state.now_s)
            if fit is None or fit.rate <= job.rate:
                continue
            stalled = job.rate <= 0
            if stalled or left / job.rate - left / fit.rate > 2 * job.job.restart_s:
                yield Preempt(name=job.job.name, reason="it moves to devices of its own")
                yield start(state, job, fit, reason="nobody waits for the free devices")
