"""What jobs keep of their rates when they run on the same devices.

Ways to know it, from the best to the weakest:

* `PairTable`: both were measured together, by class and device type; `MeasuredPairs` is the same
  for devices of one type, and estimates other groups.
* `muri.LockstepSharing`: each step is a sequence of stages on different resources, on which jobs
  take turns.
* `ResourceVectors`: each job uses a fraction of each resource of a device; where the sum exceeds
  one, all are slowed by it.

Memory is a hard limit in all: where the sum does not fit, nothing is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape


class Sharing(Protocol):
    """Shares of rates that jobs keep beside neighbours."""

    @property
    def most(self) -> int:
        """The most jobs on one set of devices."""

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the share of its rate that `job` keeps; 0: they must not run together."""


class NoSharing:
    """Devices are never shared."""

    most = 1

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return 0 beside anybody."""
        return 0.0 if neighbours else 1.0


class PairKey(NamedTuple):
    """Two classes of jobs on one device type; jobs of a pair have equal numbers of devices."""

    device_type: str
    devices: int
    profile: str
    neighbour: str


@dataclass(frozen=True, slots=True)
class PairTable:
    """Pairs that were measured together.

    Attributes:
        factors: share of its rate that the first of a pair keeps.
        most: jobs on one set of devices: pairs say nothing about three.
    """

    factors: Mapping[PairKey, float]
    most: int = 2

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the measured share; 0 for a pair that was not measured or did not fit."""
        if not neighbours:
            return 1.0
        if len(neighbours) > 1:
            return 0.0
        devices = shape.devices
        key = PairKey(shape.device_type, devices, job.profile, neighbours[0].profile)
        return self.factors.get(key, 0.0)


@dataclass(frozen=True, slots=True)
class ResourceVectors:
    """Jobs that were never measured together, by what each uses of a device alone.

    Each resource is used at the sum of the jobs' fractions; where that exceeds 1, it is the
    bottleneck and all slow down by the same factor::

        kept = (1 - interference x neighbours) / max(1, max over resources of the sum of fractions)

    Attributes:
        used: fractions of resources (compute, memory bandwidth, host, ...), by profile.
        memory_bytes: of one device by its type; no limit where it is missing.
        most: jobs on one set of devices.
        interference: share of its rate that a job loses to each neighbour in any case.
    """

    used: Mapping[str, tuple[float, ...]]
    memory_bytes: Mapping[str, int]
    most: int = 2
    interference: float = 0.05

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the share that the most loaded resource leaves."""
        if not neighbours:
            return 1.0
        group = [job, *neighbours]
        if len(group) > self.most:
            return 0.0
        capacity = self.memory_bytes.get(shape.device_type, 0)
        if capacity and sum(member.memory_bytes for member in group) > capacity:
            return 0.0
        vectors = [self.used.get(member.profile) for member in group]
        # A class that nobody measured is taken to fill the device.
        loads = [
            sum(used)
            for used in itertools.zip_longest(*(v or (1.0,) for v in vectors), fillvalue=0.0)
        ]
        kept = max(0.0, 1 - self.interference * len(neighbours))
        return kept / max(1.0, *loads)


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """Pairs that were measured together on devices of one type, and an estimate of other groups.

    Attributes:
        factors: share of its rate that the first profile keeps beside the second.
        estimate: of groups that were not measured; where it says that memory does not suffice,
            a measurement does not count.
    """

    factors: Mapping[str, Mapping[str, float]]
    estimate: ResourceVectors

    @property
    def most(self) -> int:
        """The most jobs on one set of devices."""
        return self.estimate.most

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the measured share of a pair, or the estimate."""
        estimate = self.estimate.kept(job, neighbours, shape)
        if len(neighbours) != 1 or not estimate:
            return estimate
        return self.factors.get(job.profile, {}).get(neighbours[0].profile, estimate)
