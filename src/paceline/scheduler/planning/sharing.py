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
class, that with the least to lose, is tried: K classes cost K trials, however many devices. What
the members of a group keep depends on their profiles and memory, and is asked once for each sort.
Source: W. Xiao et al., Gandiva, OSDI 2018 (packing); Y. Zhao et al., Muri, SIGCOMM 2022 (groups of
up to four, by gain); the exchange is the 2-opt of local search.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paceline.scheduler.planning.candidates import Candidate
from paceline.scheduler.rates.rates import Rates
from paceline.scheduler.state.inventory import Inventory, Parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.scheduler.planning.assignment import Assignment

_Devices: TypeAlias = tuple[str, int]  # type and number
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


@dataclass(slots=True, eq=False)
class _GroupClass:
    """Groups of equal profiles on equal devices, that of the least value at hand.

    Attributes:
        number: of classes that were made before.
        members: candidates of any of the groups.
        heap: groups by value, then in the order in which they came; with some that have left.
        inside: groups that have not left.
    """

    number: int
    members: int
    heap: list[tuple[float, int, JobGroup]] = field(default_factory=list)
    inside: set[JobGroup] = field(default_factory=set)

    def add(self, group: JobGroup, order: int) -> None:
        self.inside.add(group)
        heapq.heappush(self.heap, (group.value, order, group))

    def least(self, but: JobGroup | None) -> JobGroup | None:
        """Return the group of the least value, other than `but`; None if there is none."""
        while self.heap and self.heap[0][2] not in self.inside:
            heapq.heappop(self.heap)
        if not self.heap or self.heap[0][2] is not but:
            return self.heap[0][2] if self.heap else None
        own = heapq.heappop(self.heap)
        other = self.least(None)
        heapq.heappush(self.heap, own)
        return other


class _GroupClasses:
    """Groups by the profiles of their members and by their devices."""

    def __init__(self, candidates: Sequence[Candidate], groups: Sequence[JobGroup]) -> None:
        self._candidates = candidates
        self._order = itertools.count()
        self._known: dict[tuple[object, ...], _GroupClass] = {}
        self._on: dict[_Devices, list[_GroupClass]] = {}
        for group in groups:
            self.add(group)

    def add(self, group: JobGroup) -> None:
        """Take a group, whose value does not change while it is here."""
        key = self._key(group)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _GroupClass(len(self._known), len(group.members))
            self._on.setdefault((group.device_type, group.devices), []).append(known)
        known.add(group, next(self._order))

    def remove(self, group: JobGroup) -> None:
        self._known[self._key(group)].inside.remove(group)

    def fitting(self, candidate: Candidate) -> list[_GroupClass]:
        """Return the classes on devices on which a candidate can run, the oldest class first."""
        fitting = [
            known
            for option in candidate.options
            for known in self._on.get((option.device_type, option.devices), ())
        ]
        return fitting if len(candidate.options) == 1 else sorted(fitting, key=lambda c: c.number)

    def _key(self, group: JobGroup) -> tuple[object, ...]:
        profiles = sorted(self._candidates[i].job.job.profile for i in group.members)
        return (group.device_type, group.devices, *profiles)


@dataclass(slots=True)
class GroupFormer:
    """Forms groups.

    Attributes:
        candidates: of the plan.
        rates: that know what jobs keep of their rates.
        most: jobs in a group.
        inventory: that knows the memory of the devices.
        least_gain: useful work, in devices, that each further member must add.
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
    _options: dict[tuple[int, _Devices], int | None] = field(default_factory=dict)
    _sorts: dict[tuple[object, ...], int] = field(default_factory=dict)
    _sort_of: list[int] = field(default_factory=list)
    _kept: dict[tuple[_Devices, tuple[int, ...]], tuple[float, ...]] = field(default_factory=dict)

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
            waiting.sort(key=self._density, reverse=True)
            groups, waiting = self._join(groups, waiting, assignment)
            if len(groups) <= self.window:
                self._exchange(groups, waiting)
        return groups

    def _density(self, index: int) -> float:
        return self.candidates[index].density

    def _group_of(self, index: int, device_type: str, devices: int) -> JobGroup:
        slot = self.candidates[index].job.slot
        group = JobGroup(device_type, devices, [index])
        if slot and (slot.shape.device_type, slot.shape.devices) == (device_type, devices):
            group.home = slot.parts
        group.value = self._score(group, [index])
        return group

    def _value_on(self, index: int, on: _Devices, home: Parts | None = None) -> float:
        """Return the value of a candidate alone on such devices; minus infinity: it cannot run."""
        candidate = self.candidates[index]
        key = index, on
        if key not in self._options:
            self._options[key] = candidate.option_on(*on)
        option = self._options[key]
        if option is None:
            return _IMPOSSIBLE
        slot = candidate.job.slot
        stays = slot is not None and slot.parts == home
        return candidate.values[option] if stays else candidate.moved[option]

    def _score(self, group: JobGroup, members: Sequence[int]) -> float:
        """Return the value of a group with such members; minus infinity: it must not be formed."""
        on = group.device_type, group.devices
        if len(members) == 1:
            return self._value_on(members[0], on, group.home)
        shares = self._shares(members, on)
        if not shares:
            return _IMPOSSIBLE
        value = 0.0
        for index, share in zip(members, shares, strict=True):
            value += self._value_on(index, on, group.home) * share
        return value

    def _shares(self, members: Sequence[int], on: _Devices) -> tuple[float, ...]:
        """Return what each member keeps of its rate; nothing if they must not share."""
        if not self._sort_of:
            jobs = (candidate.job.job for candidate in self.candidates)
            self._sort_of = [
                self._sorts.setdefault((j.profile, j.memory_bytes, j.shares), len(self._sorts))
                for j in jobs
            ]
        key = on, tuple(self._sort_of[index] for index in members)
        shares = self._kept.get(key)
        if shares is None:
            shares = self._kept[key] = self._ask(members, on)
        return shares

    def _ask(self, members: Sequence[int], on: _Devices) -> tuple[float, ...]:
        jobs = [self.candidates[index].job.job for index in members]
        needed = sum(job.memory_bytes for job in jobs)
        if (
            len(members) > self.most
            or not all(job.shares for job in jobs)
            or not self.inventory.memory_suffices(needed, on[0])
        ):
            return ()
        shape = self.inventory.closest(*on)
        shares = tuple(
            self.rates.kept(job, [*jobs[:place], *jobs[place + 1 :]], shape)
            for place, job in enumerate(jobs)
        )
        pays = sum(shares) >= 1 + self.least_gain * (len(members) - 1)
        return shares if pays and min(shares) > 0 else ()

    def _join(
        self, groups: Sequence[JobGroup], waiting: list[int], assignment: Assignment
    ) -> tuple[list[JobGroup], list[int]]:
        """Let jobs join groups; return the groups, and the jobs that still wait."""
        group_of = {group.members[0]: group for group in groups}
        order = sorted([*group_of, *waiting[: self.window]], key=self._density, reverse=True)
        classes = _GroupClasses(self.candidates, groups)
        left = dict.fromkeys(groups)  # a set with an order
        wanted = sum(self.candidates[index].options[0].devices for index in waiting)
        for index in order:
            own = group_of.get(index)
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
                del left[own]
                classes.remove(own)
                assignment.free[own.device_type] += own.devices
            classes.remove(joined)
            joined.members.append(index)
            joined.value = self._score(joined, joined.members)
            classes.add(joined)
            group_of[index] = joined
        still = [index for index in waiting if index not in group_of]
        return self._use_free(still, list(left), assignment)

    def _best_group(
        self, index: int, own: JobGroup | None, classes: _GroupClasses, base: float
    ) -> JobGroup | None:
        best, best_gain = None, 0.0
        for known in classes.fitting(self.candidates[index]):
            if known.members >= self.most:
                continue
            group = known.least(but=own)
            if group is None:
                continue
            gain = self._score(group, [*group.members, index]) - group.value - base
            if gain > best_gain * _IMPROVES:
                best, best_gain = group, gain
        return best

    def _use_free(
        self, waiting: list[int], groups: list[JobGroup], assignment: Assignment
    ) -> tuple[list[JobGroup], list[int]]:
        """Give free devices to waiting jobs; return all groups, and the jobs that still wait."""
        left: list[int] = []
        if not any(assignment.free.values()):
            return groups, waiting
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
        return groups, left

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
        on = group.device_type, group.devices
        if index < 0 or self._value_on(index, on) == _IMPOSSIBLE:
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
