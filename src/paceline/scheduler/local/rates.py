"""Measured rates of a queue's jobs, from a file: what elastic jobs and sharing are decided by.

{"version": 1,
 "alone": {"digits": {"cpu": {"1": 110.0, "2": 190.0}}},      units of work per second
 "used": {"digits": [0.6, 0.3]},                              fractions of a device's resources
 "most": 2}                                                   jobs on one set of devices
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.record import Record
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.sharing import ResourceVectors

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.scheduler.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRates(Record):
    """Rates by profile.

    Attributes:
        alone: units of work per second by profile, device type and number of devices.
        used: fractions of a device's resources that one job uses, by profile; a job of a profile
            that is missing here fills its devices.
        most: jobs that may share a set of devices; 1: none share.
        interference: share of its rate that a job loses to each neighbour in any case.
    """

    alone: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    used: dict[str, tuple[float, ...]] = field(default_factory=dict)
    most: int = 1
    interference: float = 0.05

    def __post_init__(self) -> None:
        for profile, by_type in self.alone.items():
            for device_type, by_count in by_type.items():
                for count, rate in by_count.items():
                    if not (count.isdecimal() and int(count) > 0 and rate > 0):
                        raise ConfigError(
                            f"'{count}': {rate} is not a rate by a number of devices",
                            where=f"alone, {profile}, {device_type}",
                            fix='Write numbers of devices as "1", "2", and rates above 0',
                        )
        if self.most < 1:
            raise ConfigError(f"{self.most} jobs share devices", fix="Give at least 1")

    def model(self, cluster: Cluster) -> RateModel:
        """Return the rate model for a cluster."""
        profiles = {
            name: Profile(
                alone={
                    device_type: {int(count): rate for count, rate in by_count.items()}
                    for device_type, by_count in by_type.items()
                }
            )
            for name, by_type in self.alone.items()
        }
        if self.most == 1:
            return RateModel(profiles)
        memory = {node.device_type: node.memory_bytes for node in cluster.nodes}
        sharing = ResourceVectors(
            used=self.used,
            memory_bytes=memory,
            most=self.most,
            interference=self.interference,
        )
        return RateModel(profiles, sharing)


def read_rates(path: Path | None) -> MeasuredRates:
    """Return the rates of a file; None: no rates, every job makes a unit of work per second.

    Raises:
        NotFound: there is no such file.
        ConfigError: it is not a file of rates.
    """
    if path is None:
        return MeasuredRates()
    return MeasuredRates.from_text(read_text(path), where=str(path))
