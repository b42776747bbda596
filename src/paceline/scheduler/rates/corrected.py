"""Rates that learn: estimates, corrected by what running jobs report.

Each class of jobs has a factor for each device type and number of devices, and each group of
classes on shared devices one for each member. A report moves its factor towards measured /
estimated::

    factor += gain x (measured / estimated - factor)       gain = max(1 / reports, least_gain)
    counted on = estimate x factor x (1 - doubt / (1 + reports))      of shares that jobs keep

so that the first report replaces the guess, later ones average, and the doubt about sharing shrinks
with each. A group whose members together did less than one job alone would have, `slow_limit` times
in a row, is never formed again.
Source: exponentially weighted moving average; W. Xiao et al., Gandiva, OSDI 2018 (undo by trial).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

from paceline.core.record import Record
from paceline.scheduler.rates.model import RateModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape
    from paceline.scheduler.rates.rates import Rates

_Group: TypeAlias = tuple[str, int, tuple[str, ...]]  # device type, devices, profiles in order
_NOTICED = 0.01  # change of a factor that changes what should run


@runtime_checkable
class Learner(Protocol):
    """Rates that take reports of running jobs."""

    def observe(
        self,
        job: Job,
        neighbours: Sequence[Job],
        shape: Shape,
        rate: float,
        work_done: float = 0.0,
    ) -> bool:
        """Take a measured rate; return whether estimates changed noticeably."""

    def give(self, profile: str, alone: Mapping[str, Mapping[int, float]]) -> bool:
        """Take rates of a class in place of what is known; return whether they are used."""


class AloneFactor(NamedTuple):
    """What reports made of an estimated rate: measured over estimated, and their number."""

    profile: str
    device_type: str
    devices: int
    value: float
    reports: int


class SharedFactor(NamedTuple):
    """The same of the share that a job of `profile` keeps in a group of classes."""

    device_type: str
    devices: int
    group: tuple[str, ...]
    profile: str
    value: float
    reports: int


class SlowGroup(NamedTuple):
    """How often in a row a group of classes did not pay."""

    device_type: str
    devices: int
    group: tuple[str, ...]
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned(Record):
    """What reports taught: `CorrectedRates` can begin with it.

    Attributes:
        alone, shared, slow: one row for each class, member of a group, and group.
    """

    alone: tuple[AloneFactor, ...] = ()
    shared: tuple[SharedFactor, ...] = ()
    slow: tuple[SlowGroup, ...] = ()


@dataclass(slots=True)
class _Factor:
    """Measured over estimated, and the number of reports."""

    value: float = 1.0
    reports: int = 0

    def move(self, ratio: float, least_gain: float) -> bool:
        self.reports += 1
        before = self.value
        self.value += max(1 / self.reports, least_gain) * (ratio - self.value)
        return abs(self.value - before) > _NOTICED * before


class CorrectedRates:
    """Estimates with the factors that reports gave; see the module."""

    def __init__(
        self,
        estimates: Rates,
        *,
        doubt: float = 0.1,
        least_gain: float = 0.2,
        slow_limit: int = 3,
        learned: Learned | None = None,
        is_measured: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Begin with factors of 1, or with those that were learned before.

        Args:
            estimates: to be corrected.
            doubt: share by which an estimate of what jobs keep is lowered before any report.
            least_gain: weight of a new report among many.
            slow_limit: reports in a row, of groups that do not pay, after which they are undone.
            learned: by other corrected rates of the same estimates.
            is_measured: whether the estimates have rates of a profile. What a job of another one
                keeps beside neighbours is not known before it reported alone.
        """
        self.estimates = estimates
        self.doubt = doubt
        self.least_gain = least_gain
        self.slow_limit = slow_limit
        self._alone: dict[tuple[str, str, int], _Factor] = {}
        self._kept: dict[tuple[_Group, str], _Factor] = {}
        self._slow: dict[_Group, int] = {}
        self._is_measured = is_measured
        for row in learned.alone if learned else ():
            key = (row.profile, row.device_type, row.devices)
            self._alone[key] = _Factor(row.value, row.reports)
        for member in learned.shared if learned else ():
            group = (member.device_type, member.devices, member.group)
            self._kept[group, member.profile] = _Factor(member.value, member.reports)
        for slow in learned.slow if learned else ():
            self._slow[slow.device_type, slow.devices, slow.group] = slow.times

    def learned(self, most: int) -> Learned:
        """Return what was learned, at most so many rows of a kind: those that came last."""
        alone = [AloneFactor(*key, f.value, f.reports) for key, f in self._alone.items()]
        shared = [
            SharedFactor(*group, profile, f.value, f.reports)
            for (group, profile), f in self._kept.items()
        ]
        slow = [SlowGroup(*group, times) for group, times in self._slow.items() if times]
        return Learned(
            alone=tuple(alone[-most:]), shared=tuple(shared[-most:]), slow=tuple(slow[-most:])
        )

    def give(self, profile: str, alone: Mapping[str, Mapping[int, float]]) -> bool:
        """Take rates of a class; what was learned of it counted for others."""
        if not isinstance(self.estimates, RateModel):
            return False
        self.estimates.give(profile, alone)
        for key in [key for key in self._alone if key[0] == profile]:
            del self._alone[key]
        return True

    @property
    def most_sharing(self) -> int:
        """The most jobs on one set of devices."""
        return self.estimates.most_sharing

    def alone(self, job: Job, shape: Shape, work_done: float = 0.0) -> float:
        """Return the corrected rate; see `Rates.alone`."""
        factor = self._alone.get((job.profile, shape.device_type, shape.devices))
        rate = self.estimates.alone(job, shape, work_done)
        return rate if factor is None else rate * factor.value

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the corrected share, lowered by what is in doubt; see `Rates.kept`."""
        kept = self.estimates.kept(job, neighbours, shape)
        if not neighbours or not kept:
            return kept
        group = _group(job, neighbours, shape)
        if self._slow.get(group, 0) >= self.slow_limit:
            return 0.0
        factor = self._kept.get((group, job.profile))
        if factor is None:
            return kept * (1 - self.doubt)
        return min(1.0, kept * factor.value) * (1 - self.doubt / (1 + factor.reports))

    def constant_until(self, job: Job, work_done: float) -> float:
        """Return when `alone` changes by itself; see `Rates.constant_until`."""
        return self.estimates.constant_until(job, work_done)

    def observe(
        self,
        job: Job,
        neighbours: Sequence[Job],
        shape: Shape,
        rate: float,
        work_done: float = 0.0,
    ) -> bool:
        """Take a measured rate of a running job.

        Args:
            job: that reported.
            neighbours: on the same devices.
            shape: of its placement.
            rate: units of work per second; a job that stands still says nothing of its class, and
                is not counted.
            work_done: units of work since its begin, on which the estimate may depend.

        Returns:
            Whether an estimate changed by more than 1 %.
        """
        if rate <= 0:
            return False
        if not neighbours:
            estimated = self.estimates.alone(job, shape, work_done)
            if estimated <= 0:
                return False
            key = (job.profile, shape.device_type, shape.devices)
            factor = self._alone.setdefault(key, _Factor())
            return factor.move(rate / estimated, self.least_gain)
        key = (job.profile, shape.device_type, shape.devices)
        if key not in self._alone and not self._is_measured(job.profile):
            return False
        alone = self.alone(job, shape, work_done)
        estimated = alone * self.estimates.kept(job, neighbours, shape)
        if estimated <= 0:
            return False
        group = _group(job, neighbours, shape)
        factor = self._kept.setdefault((group, job.profile), _Factor())
        changed = factor.move(rate / estimated, self.least_gain)
        return self._judge(group, [job, *neighbours], shape) or changed

    def _judge(self, group: _Group, jobs: Sequence[Job], shape: Shape) -> bool:
        """Count whether a group pays, once all members reported; return whether it is undone."""
        total = 0.0
        for job in jobs:
            factor = self._kept.get((group, job.profile))
            if factor is None:
                return False
            others = [other for other in jobs if other is not job]
            total += self.estimates.kept(job, others, shape) * factor.value
        self._slow[group] = self._slow.get(group, 0) + 1 if total < 1 else 0
        return self._slow[group] == self.slow_limit


def _group(job: Job, neighbours: Sequence[Job], shape: Shape) -> _Group:
    profiles = sorted([job.profile, *(other.profile for other in neighbours)])
    return shape.device_type, shape.devices, tuple(profiles)
