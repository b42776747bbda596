"""Paceline's own policy: what progress is worth, prices for devices, sharing where it pays.

A plan says for all jobs at once what should run where:

    1  `candidates`   what a second of each job's progress is worth; its formula is there
    2  `assignment`   device types and numbers of devices, by prices that clear the market
    3  `sharing`      jobs that are worth more together than apart
    4  `realisation`  from what runs now to what should

A queue of up to `small_queue` jobs is planned anew at each instant at which something happened.
Longer queues are planned at most every `plan_s`, and between two plans, jobs start on free devices
in the order of the last plan, as backfill: that costs what the free devices cost, not the queue.

Tenants with a quota never hold more devices than it. A job that cannot be preempted stays where it
is; the others are planned around it, and a wide job that such jobs keep out gets a reservation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.record import nearest
from paceline.report.units import plural
from paceline.scheduler.events import (
    DevicesBack,
    DevicesLost,
    Measured,
    NodeBack,
    NodeLost,
    Started,
    Stopped,
    Submitted,
)
from paceline.scheduler.planning.assignment import assign
from paceline.scheduler.planning.candidates import (
    Candidate,
    Objective,
    Options,
    candidates_of,
)
from paceline.scheduler.planning.realisation import Realisation, movable
from paceline.scheduler.planning.reservation import Reservation, let_in, put_first, reserve
from paceline.scheduler.planning.sharing import GroupFormer, JobGroup
from paceline.scheduler.policies.fitting import Fit, fastest_fit, refuse_unfit, start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.job import Job
    from paceline.scheduler.state.state import JobState, State

OBJECTIVES = {
    "jct": Objective(),
    "makespan": Objective(alpha=0.0, critical_from=0.3, critical_power=4.0),
    "fairness": Objective(alpha=0.0, critical_from=0.0, patience=1.0),
    "utilisation": Objective(alpha=0.0, critical_from=0.0),
}


@dataclass(slots=True)
class Paceline:
    """The policy; see the module.

    Attributes:
        objective: what is planned for.
        sharing: most jobs on one set of devices, if the rates know how they share; 1: never.
        least_gain: useful work, in devices, that each further member of a group must add.
        quotas: most devices of a tenant at a time, by its name.
        plan_s: between two plans of a long queue.
        small_queue: most jobs that are planned anew at each instant.
        backfill: waiting jobs to try between plans.
    """

    objective: Objective = field(default_factory=Objective)
    sharing: int = 4
    least_gain: float = 0.1
    quotas: Mapping[str, int] = field(default_factory=dict)
    plan_s: float = 60.0
    small_queue: int = 256
    backfill: int = 32
    name: str = "paceline"
    planned_s: float = float("-inf")
    _changed: bool = False
    _settled: bool = False
    _order: list[str] = field(default_factory=list)
    _options: Options = field(default_factory=Options)
    _reservation: Reservation | None = None
    _learned: int = 0

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield the actions of a new plan, or of backfill between two plans."""
        yield from refuse_unfit(state, events, self.never_allowed)
        self._changed |= any(not isinstance(event, Measured | Started) for event in events)
        if self._rates_changed(state, events):
            self._changed, self._settled = True, False
        if self._settled:
            yield from self._start_at_best(state, events)
        if self._settled:
            return
        jobs = len(state.waiting) + len(state.running)
        due = jobs <= self.small_queue or state.now_s >= self.planned_s + self.plan_s
        if self._changed and due and jobs:
            self.planned_s, self._changed = state.now_s, False
            yield from self._plan(state)
        elif state.waiting:
            yield from self._backfill(state, events)

    def wake_s(self, state: State) -> float | None:
        """Return when the next plan is due, if something happened since the last one."""
        if self._settled or not (self._changed and (state.waiting or state.running)):
            return None
        return max(self.planned_s + self.plan_s, state.now_s)

    def explain(self, state: State, job: JobState) -> str:
        """Return what keeps a waiting job from its devices, in words."""
        request = job.job
        if self._over_quota(state, job):
            quota, counted_on = self.quotas[request.tenant], self._counted(state, request.tenant)
            return (
                f"running jobs of tenant {request.tenant} may take {counted_on} of the "
                f"{plural(quota, 'device')} of its quota, and the job {request.limits[1]}"
            )
        before = self._order.index(request.name) if request.name in self._order else None
        reservation = self._reservation
        if before is None and reservation is not None:
            return (
                f"devices are held back for {reservation.name}, which needs them after "
                f"{reservation.at_s - state.now_s:.0f} s, and it would not end before"
            )
        if before is None:
            return (
                "it waits for devices that are close together, or for the next plan, in at most "
                f"{self.plan_s:.0f} s"
            )
        return (
            f"{plural(before, 'waiting job')} before it by what a second of progress on a device "
            "is worth"
        )

    def _rates_changed(self, state: State, events: Sequence[Event]) -> bool:
        """Return whether reports changed what jobs could do: by learning, or by their progress."""
        learned, self._learned = state.learned > self._learned, state.learned
        return learned or any(
            state.rates.constant_until(job.job, 0.0) != math.inf
            for event in events
            if isinstance(event, Measured) and (job := state.running.get(event.name))
        )

    def _plan(self, state: State) -> Iterator[Action]:
        candidates = candidates_of(state, self._within_quota(state), self.objective, self._options)
        pinned = [slot for slot in state.slots.values() if not movable(slot)]
        capacity = dict(state.inventory.usable)
        for slot in pinned:
            capacity[slot.shape.device_type] -= slot.shape.devices
        held = {name for slot in pinned for name in slot.jobs}
        candidates = [c for c in candidates if c.job.job.name not in held]
        self._reservation = reserve(state, candidates, capacity, pinned, self._reservation)
        if self._reservation is not None:
            candidates = let_in(candidates, self._reservation, state.now_s)
            put_first(candidates, self._reservation, state.now_s)
        assignment = assign(candidates, capacity)
        most = min(self.sharing, state.rates.most_sharing)
        groups = GroupFormer(candidates, state.rates, most, state.inventory, self.least_gain).form(
            assignment
        )
        taken = {index for group in groups for index in group.members}
        waiting = [index for index in range(len(candidates)) if index not in taken]
        waiting.sort(key=lambda index: candidates[index].density, reverse=True)
        self._order = [candidates[index].job.job.name for index in waiting]
        first = candidates[waiting[0]] if waiting else None
        self._settled = not state.waiting and all(
            len(group.members) == 1 and _at_best(candidates[group.members[0]], group)
            for group in groups
        )
        yield from Realisation(state, candidates, assignment, first).actions(groups)

    def _start_at_best(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Start new jobs on their best devices, while all others have theirs: nothing to plan."""
        disturbing = NodeLost | NodeBack | DevicesLost | DevicesBack | Stopped
        if any(isinstance(event, disturbing) for event in events):
            self._settled = False
            return
        inventory = state.inventory
        for job in list(state.waiting.values()):
            _, options = self._options.of(state, job)
            best = max(options, key=lambda option: option.speedup, default=None)
            parts = best and state.find(job.job, best.device_type, best.devices)
            fits = best and parts and inventory.shape(parts) == best.shape
            if not (best and parts and fits) or self._over_quota(state, job):
                self._settled = False
                return
            fit = Fit(best.speedup, parts, best.shape)
            yield start(state, job, fit, reason="its best devices are free")

    def _within_quota(self, state: State) -> list[JobState]:
        """Return jobs to plan: all, or as many of a tenant as its quota allows at a time."""
        jobs = [*state.running.values(), *state.waiting.values()]
        if not self.quotas:
            return jobs
        left = dict(self.quotas)
        allowed = []
        for job in jobs:
            tenant, devices = job.job.tenant, job.job.limits[1]
            if tenant in left:
                if left[tenant] < devices:
                    continue
                left[tenant] -= devices
            allowed.append(job)
        return allowed

    def _backfill(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Start waiting jobs on free devices, new ones after those of the last plan."""
        self._order.extend(e.job.name for e in events if isinstance(e, Submitted))
        tried, left = 0, []
        for position, name in enumerate(self._order):
            if tried == self.backfill or not any(state.inventory.free.values()):
                left.extend(self._order[position:])
                break
            job = state.waiting.get(name)
            if job is None:
                continue  # it started, ended or was withdrawn
            tried += 1
            fit = fastest_fit(state, job, job.job.devices)
            if fit is None or self._over_quota(state, job) or self._delays(state, job, fit):
                left.append(name)
                continue
            yield start(state, job, fit, reason="devices are free and no more valuable job fits")
        self._order = left

    def _delays(self, state: State, job: JobState, fit: Fit) -> bool:
        """Return whether a job that cannot be preempted would delay the job with a reservation."""
        reservation = self._reservation
        if reservation is None or job.job.preemptible or job.job.name == reservation.name:
            return False
        if fit.shape.device_type != reservation.device_type:
            return False
        left = job.work_left(state.now_s)
        return left is None or state.now_s + left / fit.rate > reservation.at_s

    def never_allowed(self, job: Job) -> str:
        """Return why the quota of its tenant is too small for a job; empty if it is not."""
        quota = self.quotas.get(job.tenant)
        if quota is None or job.limits[1] <= quota:
            return ""
        return f"it may take {job.limits[1]} devices, the quota of {job.tenant} is {quota}"

    def _over_quota(self, state: State, job: JobState) -> bool:
        quota = self.quotas.get(job.job.tenant)
        if quota is None:
            return False
        return self._counted(state, job.job.tenant) + job.job.limits[1] > quota

    def _counted(self, state: State, tenant: str) -> int:
        """Return the most devices that the running jobs of a tenant may take, as a plan counts."""
        return sum(
            other.job.limits[1] for other in state.running.values() if other.job.tenant == tenant
        )


def _at_best(candidate: Candidate, group: JobGroup) -> bool:
    best = max(candidate.options, key=lambda option: option.speedup)
    return (group.device_type, group.devices) == (best.device_type, best.devices)


def for_objective(objective: str = "jct") -> Paceline:
    """Return the policy for an objective.

    Args:
        objective: one of `OBJECTIVES`.

    Raises:
        UsageError: it is none of them.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"no objective '{objective}'", fix=nearest(objective, OBJECTIVES))
    return Paceline(objective=OBJECTIVES[objective])
