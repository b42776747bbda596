"""Paceline's own policy: what progress is worth, prices for devices, sharing where it pays.

A plan says for all jobs at once what should run where:

    1  `candidates`   what a second of each job's progress is worth; its formula is there
    2  `assignment`   device types and numbers of devices, by prices that clear the market
    3  `sharing`      jobs that are worth more together than apart
    4  realisation    from what runs now to what should: who stays is not touched; who leaves is
                      preempted; wide jobs are placed first; where free devices are scattered, the
                      jobs in the way are moved if that costs less than the wide job gains

A queue of up to `small_queue` jobs is planned anew at each instant at which something happened.
Longer queues are planned at most every `plan_s`, and between two plans, jobs start on free devices
in the order of the last plan, as backfill: that costs what the free devices cost, not the queue.

Tenants with a quota never hold more devices than it. A job that cannot be preempted stays where it
is; the others are planned around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.record import nearest
from paceline.scheduler.events import (
    Measured,
    NodeBack,
    NodeLost,
    Preempt,
    Refuse,
    Start,
    Started,
    Stopped,
    Submitted,
)
from paceline.scheduler.placement import Placement
from paceline.scheduler.planning.assignment import Assignment, assign
from paceline.scheduler.planning.candidates import (
    Candidate,
    Objective,
    Option,
    Options,
    candidates_of,
)
from paceline.scheduler.planning.sharing import GroupFormer, JobGroup
from paceline.scheduler.policies.fitting import Fit, counted, fastest_fit, never_fits, start
from paceline.scheduler.state.state import State

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape
    from paceline.scheduler.state.inventory import Parts
    from paceline.scheduler.state.state import JobState, Slot

_SCATTERED = 0.5  # of the rate close together: with less, a job waits for better devices

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

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield the actions of a new plan, or of backfill between two plans."""
        yield from self._refuse(state, events)
        self._changed |= any(not isinstance(event, Measured | Started) for event in events)
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
            quota, held = self.quotas[request.tenant], self._held_by(state, request.tenant)
            return (
                f"tenant {request.tenant} holds {held} of the {counted(quota, 'device')} of its "
                f"quota, and the job may take {request.limits[1]}"
            )
        before = self._order.index(request.name) if request.name in self._order else None
        if before is None:
            return f"the next plan, in at most {self.plan_s:.0f} s, decides about it"
        return (
            f"{counted(before, 'waiting job')} before it by what a second of progress on a device "
            "is worth"
        )

    def _refuse(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        for event in events:
            if not isinstance(event, Submitted) or event.job.name not in state.waiting:
                continue
            if reason := never_fits(state, event.job) or self._never_allowed(event.job):
                yield Refuse(name=event.job.name, reason=reason)

    def _plan(self, state: State) -> Iterator[Action]:
        candidates = candidates_of(state, self._within_quota(state), self.objective, self._options)
        pinned = [slot for slot in state.slots.values() if not _movable(slot)]
        capacity = dict(state.inventory.usable)
        for slot in pinned:
            capacity[slot.shape.device_type] -= slot.shape.devices
        held = {name for slot in pinned for name in slot.jobs}
        candidates = [c for c in candidates if c.job.job.name not in held]
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
        yield from _Realisation(state, candidates, assignment, first).actions(groups)

    def _start_at_best(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Start new jobs on their best devices, while all others have theirs: nothing to plan."""
        if any(isinstance(event, NodeLost | NodeBack | Stopped) for event in events):
            self._settled = False
            return
        inventory = state.inventory
        for job in list(state.waiting.values()):
            _, options = self._options.of(state, job)
            best = max(options, key=lambda option: option.speedup, default=None)
            parts = best and inventory.find(best.device_type, best.devices)
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
            if fit is None or self._over_quota(state, job):
                left.append(name)
                continue
            yield start(state, job, fit, reason="devices are free and no more valuable job fits")
        self._order = left

    def _never_allowed(self, job: Job) -> str:
        quota = self.quotas.get(job.tenant)
        if quota is None or job.limits[1] <= quota:
            return ""
        return f"it may take {job.limits[1]} devices, the quota of {job.tenant} is {quota}"

    def _over_quota(self, state: State, job: JobState) -> bool:
        quota = self.quotas.get(job.job.tenant)
        if quota is None:
            return False
        return self._held_by(state, job.job.tenant) + job.job.limits[1] > quota

    def _held_by(self, state: State, tenant: str) -> int:
        """Return the devices on which jobs of a tenant run."""
        return sum(
            other.slot.shape.devices
            for other in state.running.values()
            if other.slot is not None and other.job.tenant == tenant
        )


@dataclass(slots=True)
class _Realisation:
    """The way from what runs to the groups of a plan."""

    state: State
    candidates: Sequence[Candidate]
    assignment: Assignment
    first_waiting: Candidate | None

    def actions(self, groups: Sequence[JobGroup]) -> Iterator[Action]:
        """Yield preemptions, then starts."""
        kept = self._match(groups)
        staying = {
            self._name(index)
            for group, slot in kept
            for index in group.members
            if self._name(index) in slot.jobs
        }
        for slot in list(self.state.slots.values()):
            if _movable(slot):
                for name in [name for name in slot.jobs if name not in staying]:
                    yield self._preempt(name)
        for group, slot in kept:
            yield from self._start(group, slot.parts)
        done = {id(group) for group, _ in kept}
        rest = sorted((g for g in groups if id(g) not in done), key=lambda g: -g.devices)
        while rest:
            group = rest.pop(0)
            parts = self._close(group.device_type, group.devices)
            if parts is None:
                moved = yield from self._vacate(group)
                rest.extend(moved)
                parts = self._close(group.device_type, group.devices) or self._fallback(group)
            if parts is not None:
                yield from self._start(group, parts)

    def _close(self, device_type: str, devices: int) -> Parts | None:
        """Return free devices that are as close together as such a number can be."""
        inventory = self.state.inventory
        parts = inventory.find(device_type, devices)
        if parts is None:
            return None
        closest = inventory.closest(device_type, devices)
        return parts if inventory.shape(parts).level <= closest.level else None

    def _fallback(self, group: JobGroup) -> Parts | None:
        """Return scattered or fewer devices, whichever is worth more, if they are worth it."""
        best, best_gain = None, 0.0
        for option, parts in self._poorer(group):
            shape = self.state.inventory.shape(parts)
            ratio = min(self._ratio(index, option, shape) for index in group.members)
            value = sum(
                self.candidates[i].moved[self.candidates[i].options.index(option)] * ratio
                if option in self.candidates[i].options
                else 0.0
                for i in group.members
            )
            gain = value - self.assignment.price[option.device_type] * option.devices
            if ratio >= _SCATTERED and gain > best_gain:
                best, best_gain = parts, gain
        return best

    def _poorer(self, group: JobGroup) -> Iterator[tuple[Option, Parts]]:
        inventory = self.state.inventory
        for option in self.candidates[group.members[0]].options:
            if option.device_type != group.device_type or option.devices > group.devices:
                continue
            if option.devices < group.devices and len(group.members) > 1:
                continue  # fewer devices are for a job alone
            parts = inventory.find(option.device_type, option.devices)
            if parts is not None:
                yield option, parts

    def _ratio(self, index: int, option: Option, shape: Shape) -> float:
        """Return the rate on devices of a shape, relative to that close together."""
        job = self.candidates[index].job
        work_done = job.work_done_at(self.state.now_s)
        near = self.state.rates.alone(job.job, option.shape, work_done)
        return self.state.rates.alone(job.job, shape, work_done) / near if near else 0.0

    def _match(self, groups: Sequence[JobGroup]) -> list[tuple[JobGroup, Slot]]:
        """Return groups that keep devices: those with members on such devices now."""
        slot_of = {name: slot for slot in self.state.slots.values() for name in slot.jobs}
        taken: set[Parts] = set()
        kept = []
        for group in groups:
            overlaps: dict[Parts, int] = {}
            for index in group.members:
                slot = slot_of.get(self._name(index))
                if slot is not None and slot.parts not in taken:
                    shape = slot.shape
                    wanted = (group.device_type, group.devices)
                    if (shape.device_type, shape.devices) == wanted and not self._improves(slot):
                        overlaps[slot.parts] = overlaps.get(slot.parts, 0) + 1
            if overlaps:
                parts = max(overlaps, key=lambda parts: overlaps[parts])
                taken.add(parts)
                kept.append((group, self.state.slots[parts]))
        return kept

    def _improves(self, slot: Slot) -> bool:
        """Return whether jobs on scattered devices would now find some that are close together."""
        inventory, shape = self.state.inventory, slot.shape
        if shape.level <= inventory.closest(shape.device_type, shape.devices).level:
            return False
        return self._close(shape.device_type, shape.devices) is not None

    def _vacate(self, group: JobGroup) -> Generator[Action, None, list[JobGroup]]:
        """Preempt small jobs from the nodes that they leave soonest empty; return their groups."""
        inventory = self.state.inventory
        size = inventory.largest_node[group.device_type]
        if inventory.free[group.device_type] < group.devices:
            return []
        wanted = -(-group.devices // size)
        by_node: dict[int, list[Slot]] = {}
        blocked: set[int] = set()
        for slot in self.state.slots.values():
            for node, _ in slot.parts:
                by_node.setdefault(node, []).append(slot)
                if len(slot.parts) > 1 or not _movable(slot) or slot.shape.devices >= group.devices:
                    blocked.add(node)
        nodes = [
            node
            for node, info in enumerate(inventory.nodes)
            if info.device_type == group.device_type
            and node not in blocked
            and node not in inventory.lost
            and info.devices >= min(size, group.devices)
        ]
        nodes.sort(key=lambda node: sum(s.shape.devices for s in by_node.get(node, ())))
        if len(nodes) < wanted:
            return []
        movers = [slot for node in nodes[:wanted] for slot in by_node.get(node, ())]
        if not self._pays(group, movers):
            return []
        moved = []
        index_of = {self._name(index): index for index in range(len(self.candidates))}
        for slot in movers:
            members = [index_of[name] for name in slot.jobs if name in index_of]
            if not members:
                continue  # the plan has no place for it
            moved.append(JobGroup(slot.shape.device_type, slot.shape.devices, members))
            for name in list(slot.jobs):
                yield Preempt(name=name, reason="it moves, to make room for a job on whole nodes")
        return moved

    def _pays(self, group: JobGroup, movers: Sequence[Slot]) -> bool:
        """Return whether the group gains more in a quarter of an hour than the moves cost."""
        cost = sum(
            candidate.weight * slot.shape.devices * candidate.job.job.restart_s
            for slot in movers
            for candidate in self.candidates
            if candidate.job.job.name in slot.jobs
        )
        return group.value * 900 > 2 * cost

    def _start(self, group: JobGroup, parts: Parts) -> Iterator[Action]:
        if all(self._name(index) not in self.state.waiting for index in group.members):
            return
        devices = self.state.inventory.devices(parts)
        placement = Placement(parts=devices, share=1 / len(group.members))
        for index in group.members:
            name = self._name(index)
            if name in self.state.waiting:
                yield Start(
                    name=name,
                    placement=placement,
                    reason=self._reason(index, group),
                    rejected=self._rejected(),
                )

    def _preempt(self, name: str) -> Preempt:
        return Preempt(
            name=name,
            reason="the devices are worth more to other jobs",
            rejected=f"{name} keeps its devices",
        )

    def _reason(self, index: int, group: JobGroup) -> str:
        candidate = self.candidates[index]
        price = self.assignment.price[group.device_type]
        text = (
            f"{group.devices} x {group.device_type}: {candidate.density:.3g} per device and "
            f"second, at a price of {price:.3g}"
        )
        if len(group.members) > 1:
            text += f", shared by {len(group.members)} jobs"
        return text

    def _rejected(self) -> str:
        first = self.first_waiting
        if first is None:
            return ""
        return f"{first.job.job.name} with {first.density:.3g} per device and second"

    def _name(self, index: int) -> str:
        return self.candidates[index].job.job.name


def _movable(slot: Slot) -> bool:
    return all(job.job.preemptible for job in slot.jobs.values())


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
