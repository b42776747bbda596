"""From what runs now to what a plan wants: which jobs to preempt, and where to start others.

Jobs whose devices and neighbours stay are not touched. Groups keep the devices of a member where
they can. The others are placed on devices as close together as they can be, the widest first. Where
free devices are scattered, small jobs are moved out of the way if that costs less than the wide job
gains; failing that, a job takes scattered or fewer devices if they are worth their price, or waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.scheduler.events import Preempt, Start
from paceline.scheduler.planning.assignment import Assignment
from paceline.scheduler.planning.candidates import Candidate, Option
from paceline.scheduler.planning.sharing import JobGroup
from paceline.scheduler.state.state import State

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from paceline.scheduler.events import Action
    from paceline.scheduler.placement import Shape
    from paceline.scheduler.state.inventory import Parts
    from paceline.scheduler.state.state import JobState, Slot

_SCATTERED = 0.5  # of the rate close together: with less, a job waits for better devices


@dataclass(slots=True)
class Realisation:
    """The way from what runs to the groups of a plan; see the module.

    Attributes:
        state: changes by each action that `actions` yields.
        candidates: of the plan.
        assignment: with the prices of devices.
        first_waiting: the most valuable candidate that the plan lets wait, if any.
    """

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
            if movable(slot):
                for name in [name for name in slot.jobs if name not in staying]:
                    yield self._preempt(name)
        for group, slot in kept:
            yield from self._start(group, slot.parts)
        done = {id(group) for group, _ in kept}
        rest = sorted((g for g in groups if id(g) not in done), key=lambda g: -g.devices)
        while rest:
            group = rest.pop(0)
            parts = self._close(group)
            if parts is None:
                moved = yield from self._vacate(group)
                rest.extend(moved)
                parts = self._close(group) or self._fallback(group)
            if parts is not None:
                yield from self._start(group, parts)

    def _close(self, group: JobGroup) -> Parts | None:
        """Return free devices for a group that are as close together as their number can be."""
        first = self.candidates[group.members[0]].job.job
        parts = self.state.find(first, group.device_type, group.devices)
        inventory = self.state.inventory
        return parts if parts and inventory.is_close(inventory.shape(parts)) else None

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
        first = self.candidates[group.members[0]].job.job
        for option in self.candidates[group.members[0]].options:
            if option.device_type != group.device_type or option.devices > group.devices:
                continue
            if option.devices < group.devices and len(group.members) > 1:
                continue  # fewer devices are for a job alone
            parts = self.state.find(first, option.device_type, option.devices)
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
        """Return whether free devices close together would pay for a move from scattered ones."""
        inventory, shape = self.state.inventory, slot.shape
        if inventory.is_close(shape):
            return False
        free = inventory.find(shape.device_type, shape.devices)
        if free is None or not inventory.is_close(inventory.shape(free)):
            return False
        closest = inventory.closest(shape.device_type, shape.devices)
        return all(self._pays_to_move(job, slot.shape, closest) for job in slot.jobs.values())

    def _pays_to_move(self, job: JobState, here: Shape, there: Shape) -> bool:
        """Return whether a job gains more than two restarts by other devices alone."""
        work_done, left = job.work_done_at(self.state.now_s), job.work_expected(self.state.now_s)
        now = self.state.rates.alone(job.job, here, work_done)
        then = self.state.rates.alone(job.job, there, work_done)
        if now <= 0 or then <= now:
            return then > now
        return left / now - left / then > 2 * job.job.restart_s

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
                if len(slot.parts) > 1 or not movable(slot) or slot.shape.devices >= group.devices:
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
        for index in group.members:
            name = self._name(index)
            if name in self.state.waiting:
                job = self.candidates[index].job.job
                placement = self.state.placement(job, parts, jobs=len(group.members))
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


def movable(slot: Slot) -> bool:
    """Return whether all jobs on some devices may be preempted."""
    return all(job.job.preemptible for job in slot.jobs.values())
