"""Which jobs share devices: groups that are worth more together than apart.

A group is jobs on one set of devices. Its value is the sum of its members' values times the share
of the rate that each keeps; a group whose useful work does not grow by at least `least_gain` of a
device for each further member is never formed, however urgent one of them is: sharing must pay for
all, because what it costs is certain and what it gains is an estimate.

    1  Jobs join groups, the most valuable first, where they gain most; a job that has devices of
       its own joins another if that and the price of its devices are worth more.
    2  Devices that became free go to waiting jobs.
    3  Members are exchanged between groups, and with waiting jobs, until nothing improves.

Groups of equal classes on equal devices differ by their members' weights only, so one of each
class, that with the least to lose, is tried: K classes cost K trials, however many devices.
Source: W. Xiao et al., Gandiva, OSDI 2018 (packing); Y. Zhao et al., Muri, SIGCOMM 2022 (groups of
up to four, by gain); the exchange is the 2-opt of local search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.scheduler.planning.candidates import Candidate
from paceline.scheduler.rates.rates import Rates
from paceline.scheduler.state.inventory import Inventory, Parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.scheduler.planning.assignment import Assignment

_IMPOSSIBLE = float("-inf")
_IMPROVES = 1 + 1e-9  # less is rounding


@dataclass(slots=True, eq=False)
class JobGroup:
    """Jobs on one set of devices.

    Attributes:
        device_type, devices: of the set.
        members: candidates, by index.
        value: of all together.
        home: devices that the group keeps: those of its first member now, or None. Members from
            elsewhere pay for a change.
    """

    device_type: str
    devices: int
    members: list[int] = field(default_factory=list)
    value: float = 0.0
    home: Parts | None = None


@dataclass(slots=True)
class GroupFormer:
    """Forms groups.

    Attributes:
        candidates: of the plan.
        rates: that know what jobs keep of their rates.
        most: jobs in a group.
        inventory: that knows the memory of the devices.
        least_gain: useful work, in devices, that each further member must add.
        doubt: share by which estimates of what is kept are lowered.
        window: waiting jobs to try, and groups to exchange among.
        sweeps: passes of the exchange.
    """

    candidates: Sequence[Candidate]
    rates: Rates
    most: int
    inventory: Inventory
    least_gain: float = 0.1
    window: int = 64
    sweeps: int = 2
    doubt: float = 0.0
    _option_of: dict[tuple[int, str, int], int | None] = field(default_factory=dict)

    def form(self, assignment: Assignment) -> list[JobGroup]:
        """Return the groups that should run.

        Args:
            assignment: of devices to single jobs; its free devices are used up.
        """
        groups = []
        waiting = []
        for index, option in enumerate(assignment.chosen):
            if option is None:
                waiting.append(index)
                continue
            chosen = self.candidates[index].options[option]
            groups.append(self._group_of(index, chosen.device_type, chosen.devices))
        if self.most > 1 and (waiting or len(groups) > 1):
            waiting.sort(key=self._worth, reverse=True)
            waiting = self._join(groups, waiting, assignment)
            if len(groups) <= self.window:
                self._exchange(groups, waiting)
        return groups

    def _worth(self, index: int) -> float:
        return self.candidates[index].density

    def _group_of(self, index: int, device_type: str, devices: int) -> JobGroup:
        slot = self.candidates[index].job.slot
        keeps = slot is not None and slot.shape[:1] == (device_type,)
        home = slot.parts if slot and keeps and slot.shape.devices == devices else None
        group = JobGroup(device_type, devices, [index], home=home)
        group.value = self._score(group, [index])
        return group

    def _value_on(
        self, index: int, device_type: str, devices: int, home: Parts | None = None
    ) -> float:
        """Return the value of a candidate alone on such devices; minus infinity: it cannot run."""
        key = (index, device_type, devices)
        if key not in self._option_of:
            self._option_of[key] = self.candidates[index].option_on(device_type, devices)
        option = self._option_of[key]
        if option is None:
            return _IMPOSSIBLE
        candidate = self.candidates[index]
        slot = candidate.job.slot
        stays = slot is not None and slot.parts == home
        return candidate.values[option] if stays else candidate.moved[option]

    def _score(self, group: JobGroup, members: Sequence[int]) -> float:
        """Return the value of a group with such members; minus infinity: it must not be formed."""
        device_type, devices, home = group.device_type, group.devices, group.home
        if len(members) == 1:
            return self._value_on(members[0], device_type, devices, home)
        if len(members) > self.most:
            return _IMPOSSIBLE
        jobs = [self.candidates[index].job.job for index in members]
        needed = sum(job.memory_bytes for job in jobs)
        if not all(job.shares for job in jobs) or not self.inventory.memory_suffices(
            needed, device_type
        ):
            return _IMPOSSIBLE
        value = useful = 0.0
        for position, index in enumerate(members):
            alone = self._value_on(index, device_type, devices, home)
            if alone == _IMPOSSIBLE:
                return _IMPOSSIBLE
            option = self._option_of[index, device_type, devices]
            neighbours = jobs[:position] + jobs[position + 1 :]
            assert option is not None
            shape = self.candidates[index].options[option].shape
            kept = self.rates.kept(jobs[position], neighbours, shape) * (1 - self.doubt)
            if kept <= 0:
                return _IMPOSSIBLE
            value += alone * kept
            useful += kept
        if useful < 1 + self.least_gain * (len(members) - 1):
            return _IMPOSSIBLE
        return value

    def _class_of(self, group: JobGroup) -> tuple[object, ...]:
        profiles = sorted(self.candidates[i].job.job.profile for i in group.members)
        return (group.device_type, group.devices, *profiles)

    def _join(
        self, groups: list[JobGroup], waiting: list[int], assignment: Assignment
    ) -> list[int]:
        """Let jobs join groups; return those that still wait."""
        alone = {group.members[0]: group for group in groups}
        order = sorted([*alone, *waiting[: self.window]], key=self._worth, reverse=True)
        classes: dict[tuple[object, ...], list[JobGroup]] = {}
        for group in groups:
            classes.setdefault(self._class_of(group), []).append(group)
        wanted = sum(self.candidates[i].options[0].devices for i in waiting)
        for index in order:
            own = alone.get(index)
            if own is not None and len(own.members) > 1:
                continue  # others joined it
            base = 0.0
            if own is not None:
                # What it leaves is worth its price as long as somebody waits for it.
                freed = assignment.price[own.device_type] * own.devices if wanted > 0 else 0.0
                base = own.value - freed
            joined = self._best_group(index, own, classes, base)
            if joined is None:
                continue
            wanted -= own.devices if own is not None else joined.devices
            if own is not None:
                groups.remove(own)
                classes[self._class_of(own)].remove(own)
                assignment.free[own.device_type] += own.devices
            classes[self._class_of(joined)].remove(joined)
            joined.members.append(index)
            joined.value = self._score(joined, joined.members)
            classes.setdefault(self._class_of(joined), []).append(joined)
            alone[index] = joined
        return self._use_free([i for i in waiting if i not in alone], groups, assignment)

    def _best_group(
        self,
        index: int,
        own: JobGroup | None,
        classes: dict[tuple[object, ...], list[JobGroup]],
        base: float,
    ) -> JobGroup | None:
        best, best_gain = None, 0.0
        for members in classes.values():
            if not members or len(members[0].members) >= self.most:
                continue
            sample = members[0]
            if self._value_on(index, sample.device_type, sample.devices) == _IMPOSSIBLE:
                continue
            others = [group for group in members if group is not own]
            if not others:
                continue
            group = min(others, key=lambda group: group.value)
            joint = self._score(group, [*group.members, index])
            gain = joint - group.value - base
            if gain > best_gain * _IMPROVES:
                best, best_gain = group, gain
        return best

    def _use_free(
        self, waiting: list[int], groups: list[JobGroup], assignment: Assignment
    ) -> list[int]:
        left = []
        for index in waiting:
            candidate = self.candidates[index]
            fitting = [
                (value / option.devices, option)
                for value, option in zip(candidate.values, candidate.options, strict=True)
                if option.devices <= assignment.free[option.device_type]
            ]
            if not fitting:
                left.append(index)
                continue
            _, option = max(fitting, key=lambda pair: pair[0])
            assignment.free[option.device_type] -= option.devices
            groups.append(self._group_of(index, option.device_type, option.devices))
        return left

    def _exchange(self, groups: list[JobGroup], waiting: list[int]) -> None:
        """Improve groups by exchanging members, until nothing improves or the passes are over."""
        waiting = waiting[: self.window]
        for _ in range(self.sweeps):
            improved = False
            for first, group in enumerate(groups):
                for place in range(len(waiting)):
                    improved |= self._replace(group, waiting, place)
                for other in groups[first + 1 :]:
                    improved |= self._swap(group, other)
            waiting = [index for index in waiting if index >= 0]
            if not improved:
                return

    def _replace(self, group: JobGroup, waiting: list[int], place: int) -> bool:
        """Put a waiting job into a group, beside its members or for one of them."""
        index = waiting[place]
        if index < 0 or self._value_on(index, group.device_type, group.devices) == _IMPOSSIBLE:
            return False
        trials = [(-1, [*group.members, index])]
        trials += [(m, [i for i in group.members if i != m] + [index]) for m in group.members]
        best, best_value = None, group.value * _IMPROVES
        for out, members in trials:
            value = self._score(group, members)
            if value > best_value:
                best, best_value = (out, members), value
        if best is None:
            return False
        waiting[place], group.members = best  # the place holds who waits now, -1 for nobody
        group.value = best_value
        return True

    def _swap(self, one: JobGroup, two: JobGroup) -> bool:
        """Exchange or move one member between two groups of equal numbers of devices."""
        if one.devices != two.devices:
            return False
        if len(one.members) == len(two.members) == 1 and one.device_type == two.device_type:
            return False
        best, best_value = None, (one.value + two.value) * _IMPROVES
        for members in _exchanges(one.members, two.members, self.most):
            first = self._score(one, members[0])
            if first == _IMPOSSIBLE:
                continue
            second = self._score(two, members[1])
            if first + second > best_value:
                best, best_value = (members, first, second), first + second
        if best is None:
            return False
        (one.members, two.members), one.value, two.value = best
        return True


def _exchanges(one: list[int], two: list[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the members of two groups after one member was exchanged or moved."""
    for i in one:
        rest = [member for member in one if member != i]
        for j in two:
            yield [*rest, j], [*(member for member in two if member != j), i]
        if rest and len(two) < most:
            yield rest, [*two, i]
    for j in two:
        rest = [member for member in two if member != j]
        if rest and len(one) < most:
            yield [*one, j], rest
