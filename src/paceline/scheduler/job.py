"""What a user asks for: the devices of a job, how its speed scales, and when it should be done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError
from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Record):
    """A request for devices.

    Attributes:
        name: unique among the jobs of a queue.
        submitted_s: seconds since the queue's first moment.
        devices: that the user asked for.
        min_devices, max_devices: between which a scheduler may choose; 0 means `devices`. A job
            whose two limits are equal is rigid.
        device_types: on which it may run; empty means any.
        profile: class of the job, whose rates are known together: usually model and batch size.
        work: units of work from begin to end, in the unit of the profile's rates; None if it is
            not known.
        tenant: who pays.
        weight: of this job against others in a mean; twice the weight counts as two jobs.
        deadline_s: seconds since the queue's first moment by which it should end; None: no matter.
        memory_bytes: that it needs on each device; 0 if it is not known.
        dataset: data that it reads; among equally good nodes, those where a job that reads it ran
            are preferred.
        mesh: sizes of the axes of its ranks, the last one with the most traffic, for example (data,
            pipeline, tensor); a rank for each device. Empty: ranks in any order are as good.
        restart_s: seconds without progress whenever it starts anew from a checkpoint.
        start_s: seconds without progress when it starts for the first time.
        preemptible: whether it may be stopped and started anew.
        shares: whether it may share devices with other jobs.
    """

    name: str
    submitted_s: float = 0.0
    devices: int = 1
    min_devices: int = 0
    max_devices: int = 0
    device_types: tuple[str, ...] = ()
    profile: str = ""
    work: float | None = None
    tenant: str = ""
    weight: float = 1.0
    deadline_s: float | None = None
    memory_bytes: int = 0
    dataset: str = ""
    # Not in the text of which a digest of inputs is made, as logs of before have none: see `State`.
    mesh: tuple[int, ...] = field(default=(), repr=False)
    restart_s: float = 0.0
    start_s: float = 0.0
    preemptible: bool = True
    shares: bool = True

    def __post_init__(self) -> None:
        low, high = self.limits
        if self.devices < 1 or low < 1 or not low <= self.devices <= high:
            raise ConfigError(
                f"job '{self.name}' asks for {self.devices} devices between {low} and {high}",
                fix="Ask for at least one device, within the job's own limits",
            )
        if self.mesh and (min(self.mesh) < 1 or {math.prod(self.mesh)} != {low, high}):
            raise ConfigError(
                f"job '{self.name}' runs on {low} to {high} devices, its mesh has "
                f"{' x '.join(map(str, self.mesh))} ranks",
                fix="Give a rank to each device of a rigid job, or no mesh",
            )
        if self.work is not None and not self.work > 0:
            raise ConfigError(
                f"job '{self.name}' has {self.work} units of work", fix="Give more than 0, or none"
            )

    @property
    def limits(self) -> tuple[int, int]:
        """The fewest and the most devices on which it may run."""
        return self.min_devices or self.devices, self.max_devices or self.devices

    @property
    def elastic(self) -> bool:
        """Whether the scheduler may choose the number of devices."""
        low, high = self.limits
        return low < high
