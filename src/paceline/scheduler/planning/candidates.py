"""What a job could run on, and what its progress is worth.

The unit of progress is the device-second: the work that one device of the job's best type does in
one second when the job runs on as few devices as it can. With S such units left, a job's progress
at `speedup` units per second is worth::

    value = weight x S^-alpha x critical x ageing x speedup x (1 - cost of a change)

alpha = 1 is the order of shortest remaining service first, per unit of time (the c-mu rule);
alpha = 0 counts useful work alone, as a scheduler for throughput would. Between them short jobs go
first, but not at any price: slowing four jobs down to hurry one is worth less, the longer the queue
behind them.

    critical    max(1, T / (threshold x H))^power. T is the time that the job takes alone, H that
                of all work on the whole cluster, or of the longest job if that is more: a job that
                could end last runs before it must. Of an elastic job, that counts for the fewest
                devices: it should run, not run wide.
    ageing      max(1, waited / (patience x T0)), T0 the time that the whole job takes alone: one
                that has waited patience x (S / s)^alpha times as long goes before every new one
                with s or more left, so that none waits for ever. By the time left, what runs would
                age faster and faster towards its end, and no gang would ever get its devices.
    change      restart / (min(amortise, T) + restart): what a start without progress costs. Where
                it would replace what runs, it counts `caution` times.

Sources: D. Cox and W. Smith, Queues, 1961 (c-mu); A. Qiao et al., Pollux, OSDI 2021 (speedups,
restart factor); J. Han et al., MARBLE, CCGrid 2020 (devices by gain); the exponent and the critical
factor are ours: bench/scheduler_jct.py shows what each does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.scheduler.state.state import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape
    from paceline.scheduler.state.state import State

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What a plan is good for; the terms of `value` in the module.

    Attributes:
        alpha: 1 for completion times alone, 0 for useful work alone.
        critical_from: threshold from which a job counts as critical; 0: never.
        critical_power: how strongly.
        patience: waiting time, in times of the whole job alone, from which ageing begins; 0: never.
        amortise_s: time within which a change of devices must pay.
        caution: times its cost that a change must gain.
        unknown_s: device-seconds that a job without known work is expected to have left at its
            begin; later as many as it has done, too.
    """

    alpha: float = 0.2
    critical_from: float = 0.7
    critical_power: float = 2.0
    patience: float = 5.0
    amortise_s: float = 5000.0
    caution: float = 3.0
    unknown_s: float = 1200.0


class Option(NamedTuple):
    """Devices on which a job could run alone.

    Attributes:
        device_type: of all of them.
        devices: how many.
        speedup: device-seconds of progress per second.
        shape: of the devices, close together.
    """

    device_type: str
    devices: int
    speedup: float
    shape: Shape


@dataclass(slots=True, eq=False)
class Candidate:
    """A job that may run in the next plan.

    Attributes:
        job: and its state.
        options: at least one.
        left: device-seconds that it has left, known or expected.
        alone_s: seconds that these take alone on its fastest devices.
        whole_s: seconds that all of the job takes there, what is done included.
        weight: worth of one device-second of its progress.
        current: index of the option on which it runs now, or None.
        values: worth of a second on each option, with the cost of a change of devices.
        moved: the same, if it runs on other devices of its current option, too.
        density: the largest worth of a second on one device.
    """

    job: JobState
    options: tuple[Option, ...]
    left: float
    alone_s: float
    whole_s: float
    weight: float = 0.0
    current: int | None = None
    values: tuple[float, ...] = ()
    moved: tuple[float, ...] = ()
    density: float = 0.0

    def raise_worth(self, factor: float) -> None:
        """Multiply what progress of the job is worth."""
        self.weight *= factor
        self.density *= factor
        self.values = tuple(value * factor for value in self.values)
        self.moved = tuple(value * factor for value in self.moved)

    def option_on(self, device_type: str, devices: int) -> int | None:
        """Return the index of the option with such devices, or None."""
        for index, option in enumerate(self.options):
            if option.devices == devices and option.device_type == device_type:
                return index
        return None


class Options:
    """Options of jobs, kept for jobs of one class as long as cluster and rates do not change."""

    def __init__(self) -> None:
        self._usable: dict[str, int] = {}
        self._learned = 0
        self._known: dict[tuple[object, ...], tuple[float, tuple[Option, ...]]] = {}

    def of(self, state: State, job: JobState) -> tuple[float, tuple[Option, ...]]:
        """Return the unit rate of a job and its options, fewest devices first; empty if none."""
        if state.inventory.usable != self._usable or state.learned != self._learned:
            self._usable, self._learned = dict(state.inventory.usable), state.learned
            self._known.clear()
        request, work_done = job.job, job.work_done_at(state.now_s)
        if state.rates.constant_until(request, work_done) != math.inf:
            return self._rated(state, request, work_done)
        key = (
            *(request.profile, request.devices, request.limits, request.device_types),
            request.memory_bytes,
        )
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._rated(state, request, work_done)
        return known

    def _rated(self, state: State, job: Job, work_done: float) -> tuple[float, tuple[Option, ...]]:
        rated = [
            (shape, rate)
            for shape in _shapes(state, job)
            if (rate := state.rates.alone(job, shape, work_done)) > 0
        ]
        if not rated:
            return 0.0, ()
        fewest = rated[0][0].devices
        unit_rate = max(rate for shape, rate in rated if shape.devices == fewest) / fewest
        options = (
            Option(shape.device_type, shape.devices, rate / unit_rate, shape)
            for shape, rate in rated
        )
        return unit_rate, tuple(options)


def candidates_of(
    state: State, jobs: Iterable[JobState], objective: Objective, known: Options
) -> list[Candidate]:
    """Return the jobs that can run on the cluster as it is, and what their progress is worth."""
    found = [c for job in jobs if (c := _candidate(state, job, objective, known)) is not None]
    if not found:
        return found
    capacity = sum(state.inventory.usable.values())
    horizon_s = max(sum(c.left for c in found) / capacity, max(c.alone_s for c in found))
    for candidate in found:
        candidate.weight = _weight(candidate, state.now_s, objective)
        worth = _progress(candidate, _critical(candidate, horizon_s, objective))
        candidate.moved = _after_change(candidate, worth, objective)
        candidate.values = candidate.moved
        if candidate.current is not None:
            values = list(candidate.moved)
            values[candidate.current] = worth[candidate.current]
            candidate.values = tuple(values)
        candidate.density = max(map(_on_one_device, candidate.values, candidate.options))
    return found


def _on_one_device(value: float, option: Option) -> float:
    return value / option.devices


def _candidate(
    state: State, job: JobState, objective: Objective, known: Options
) -> Candidate | None:
    unit_rate, options = known.of(state, job)
    if not options:
        return None
    work_left = job.work_left(state.now_s)
    done = job.work_done_at(state.now_s) / unit_rate
    left = objective.unknown_s + done if work_left is None else work_left / unit_rate
    fastest = max(option.speedup for option in options)
    candidate = Candidate(job, options, left, left / fastest, (done + left) / fastest)
    if job.slot is not None:
        held = job.slot.shape
        candidate.current = candidate.option_on(held.device_type, held.devices)
    return candidate


def _shapes(state: State, job: Job) -> Iterator[Shape]:
    """Yield the shapes of placements to consider, fewest devices first."""
    inventory = state.inventory
    for devices in sizes(job):
        for kind, usable in inventory.usable.items():
            if (
                devices <= usable
                and (not job.device_types or kind in job.device_types)
                and inventory.memory_suffices(job.memory_bytes, kind)
            ):
                yield inventory.closest(kind, devices)


def sizes(job: Job) -> Sequence[int]:
    """Return the numbers of devices to consider for a job, ascending."""
    low, high = job.limits
    if low == high:
        return (low,)
    return sorted({low, job.devices, high, *(size for size in _SIZES if low <= size <= high)})


def _weight(candidate: Candidate, now_s: float, objective: Objective) -> float:
    job = candidate.job
    alone_s = candidate.alone_s
    weight: float = job.job.weight * candidate.left**-objective.alpha
    if objective.patience:
        # What it waited counts while it runs, too: else it would be preempted as soon as it runs.
        waited_s = job.waited_s + (now_s - job.waiting_since_s if job.slot is None else 0.0)
        weight *= max(1.0, waited_s / (objective.patience * max(candidate.whole_s, 60.0)))
    if job.job.deadline_s is not None:
        slack_s = job.job.deadline_s - now_s - alone_s
        if 0 <= slack_s < alone_s:  # it can still be met, and not much longer
            weight *= 1 + 10 * (1 - slack_s / alone_s)
    return weight


def _critical(candidate: Candidate, horizon_s: float, objective: Objective) -> float:
    if not objective.critical_from or candidate.job.job.work is None:
        return 1.0
    ratio = candidate.alone_s / (objective.critical_from * horizon_s)
    return float(max(1.0, ratio) ** objective.critical_power)


def _progress(candidate: Candidate, critical: float) -> tuple[float, ...]:
    """Return the worth of a second on each option, without the cost of a change."""
    fewest = candidate.options[0].devices
    narrow = {o.device_type: o.speedup for o in candidate.options if o.devices == fewest}
    return tuple(
        candidate.weight
        * (option.speedup + (critical - 1) * min(option.speedup, narrow.get(option.device_type, 0)))
        for option in candidate.options
    )


def _after_change(
    candidate: Candidate, worth: tuple[float, ...], objective: Objective
) -> tuple[float, ...]:
    """Return the worth of a second on each option, reached by a change of devices."""
    job = candidate.job
    cost_s = job.job.restart_s if job.starts else job.job.start_s
    if not cost_s:
        return worth
    if job.slot is not None:
        cost_s *= objective.caution
    return tuple(
        value * (1 - cost_s / (min(objective.amortise_s, candidate.left / option.speedup) + cost_s))
        for value, option in zip(worth, candidate.options, strict=True)
    )
