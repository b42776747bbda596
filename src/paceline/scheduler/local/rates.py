"""Measured rates of a queue's jobs: what sizes of elastic jobs, and sharing, are decided by.

rates.csv       units of work per second by profile, device type and number of devices, as
`queue simulate` reads them (docs/reference/queue-csv.md)
sharing.json    {"version": 1, "most": 2, "used": {"digits": [0.6, 0.3]},
                 "pairs": {"digits": {"digits": 0.8}}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.record import Record
from paceline.scheduler.formats.queue_csv import read_rates
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.sharing import MeasuredPairs, ResourceVectors

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.scheduler.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSharing(Record):
    """What jobs use of a device, and how many may share one.

    Attributes:
        used: fractions of a device's resources (compute, memory bandwidth, ...) that a job of a
            profile uses; a job of a profile that is missing here fills its devices.
        pairs: share of its rate that a job of the first profile keeps beside one of the second,
            where both were measured together; other groups are estimated by what they use.
        most: jobs on one set of devices; 1: none share.
        interference: share of its rate that a job loses to each neighbour in any case.
    """

    used: dict[str, tuple[float, ...]] = field(default_factory=dict)
    pairs: dict[str, dict[str, float]] = field(default_factory=dict)
    most: int = 1
    interference: float = 0.05

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"{self.most} jobs share devices", fix="Give at least 1")
        for profile, kept_beside in self.pairs.items():
            for neighbour, kept in kept_beside.items():
                if not 0 <= kept <= 1:
                    raise ConfigError(
                        f"a job of '{profile}' keeps {kept} of its rate beside '{neighbour}'",
                        fix="Give a share between 0 (they must not share) and 1",
                    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRates(Record):
    """Rates by profile, as the log of a queue has them.

    Attributes:
        alone: units of work per second by profile, device type (empty: any) and number of devices.
        sharing: what jobs use of devices that they share.
    """

    alone: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    sharing: MeasuredSharing = MeasuredSharing()  # frozen

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
        if self.sharing.most == 1:
            return RateModel(profiles)
        vectors = ResourceVectors(
            used=self.sharing.used,
            memory_bytes={node.device_type: node.memory_bytes for node in cluster.nodes},
            most=self.sharing.most,
            interference=self.sharing.interference,
        )
        return RateModel(profiles, MeasuredPairs(self.sharing.pairs, vectors))


def read_measured(rates: Path | None, sharing: Path | None) -> MeasuredRates:
    """Return what is known of rates.

    Args:
        rates: CSV file; None: every job makes a unit of work per second.
        sharing: JSON file; None: no job shares devices.

    Raises:
        NotFound: a file is not there.
        CorruptData: a line of the CSV file cannot be read.
        ConfigError: the JSON file is not one of sharing.
    """
    alone = {
        name: {
            device_type: {str(count): rate for count, rate in by_count.items()}
            for device_type, by_count in profile.alone.items()
        }
        for name, profile in (read_rates(rates) if rates is not None else {}).items()
    }
    if sharing is None:
        return MeasuredRates(alone=alone)
    shared = MeasuredSharing.from_text(read_text(sharing), where=str(sharing))
    return MeasuredRates(alone=alone, sharing=shared)
