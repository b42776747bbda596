"""The rate model: alone(type) x scale(n) x topology(placement) x share(neighbours).

    what is known of a profile                       used for
    rates by device type and number of devices       the curve of the type; a measured number of
                                                     devices of a rigid job as it is
    ratio of the rate on spread devices, or          placements over more nodes than needed, or
      message size, and the cluster's links          farther apart
    a `Sharing`                                      neighbours

A number of devices that was measured was measured close together: where it needs several nodes, its
rate holds for as many nodes below one switch.
Device types on which a profile was never measured cannot be chosen for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.scheduler.rates.curve import DEFAULT_PRIOR, Curve, Prior
from paceline.scheduler.rates.sharing import NoSharing, Sharing
from paceline.scheduler.rates.topology import Exchange, distance_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.scheduler.cluster import Cluster, Level
    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape


ANY_TYPE = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured rates of a class of jobs.

    Attributes:
        alone: units of work per second by device type and number of devices, close together;
            the type `ANY_TYPE` stands for all that are not named.
        spread: the same for devices on more nodes than needed, as a share of `alone`, by device
            type and number of devices.
        exchange: what its ranks exchange, by device type as in `alone`; used where `spread` has no
            entry.
        prior: shape of the curve of a type with one measured number of devices.
    """

    alone: Mapping[str, Mapping[int, float]]
    spread: Mapping[tuple[str, int], float] = field(default_factory=dict)
    exchange: Mapping[str, Exchange] = field(default_factory=dict)
    prior: Prior = DEFAULT_PRIOR


class RateModel:
    """Rates of jobs by their profiles; see the module.

    A job whose profile is not known makes one unit of work per second on any device with as many
    devices as it asked for, so that its work is its duration.
    """

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        sharing: Sharing | None = None,
        levels: Sequence[Level] = (),
        node_devices: Mapping[str, int] | None = None,
    ) -> None:
        """Take what is known.

        Args:
            profiles: by name.
            sharing: what jobs keep beside neighbours; None: they must not share.
            levels: links of the cluster; empty: `Profile.exchange` makes no difference.
            node_devices: devices of a node, by type; a type that is missing has nodes of any size.
        """
        self.profiles = dict(profiles)
        self.sharing = sharing or NoSharing()
        self.levels = tuple(levels)
        self.node_devices = dict(node_devices or {})
        self._cache: dict[tuple[str, Shape], float] = {}
        self._curves: dict[tuple[str, str], Curve] = {}

    def on(self, cluster: Cluster) -> RateModel:
        """Return the same rates on the nodes of a cluster, over its links if it names them."""
        levels = cluster.levels or self.levels
        return RateModel(self.profiles, self.sharing, levels, cluster.largest_nodes())

    @property
    def most_sharing(self) -> int:
        """The most jobs on one set of devices."""
        return self.sharing.most

    def alone(self, job: Job, shape: Shape, work_done: float = 0.0) -> float:
        """Return units of work per second with the devices for itself; see `Rates.alone`."""
        profile = self.profiles.get(job.profile)
        if profile is None:
            return shape.devices / job.devices if job.elastic else 1.0
        key = (job.profile, shape)
        rate = self._cache.get(key)
        if rate is None:
            rate = self._cache[key] = self._rate(job.profile, profile, shape)
        return rate

    def give(self, profile: str, alone: Mapping[str, Mapping[int, float]]) -> None:
        """Take measured rates of a profile, by device type and number of devices, for its own."""
        self.profiles[profile] = Profile(alone=alone)
        self._cache = {key: rate for key, rate in self._cache.items() if key[0] != profile}
        self._curves = {key: curve for key, curve in self._curves.items() if key[0] != profile}

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the share of its rate that a job keeps; see `Rates.kept`."""
        return self.sharing.kept(job, neighbours, shape)

    def constant_until(self, job: Job, work_done: float) -> float:
        """Return infinity: rates of profiles do not change with progress."""
        return math.inf

    def _rate(self, name: str, profile: Profile, shape: Shape) -> float:
        kind = shape.device_type if shape.device_type in profile.alone else ANY_TYPE
        measured = profile.alone.get(kind)
        if not measured:
            return 0.0
        devices = shape.devices
        rate = measured.get(devices)
        if rate is None:
            curve = self._curves.get((name, kind))
            if curve is None:
                curve = Curve(measured.items(), profile.prior)
                self._curves[name, kind] = curve
            rate = curve.rate(devices)
        if shape.level:
            needed = -(-devices // self.node_devices.get(shape.device_type, devices))
            ratio = profile.spread.get((kind, devices))
            exchange = profile.exchange.get(kind)
            if ratio is not None:
                rate *= ratio if len(shape.per_node) > needed else 1.0
            elif exchange is not None:
                near = 1 if needed > 1 and devices in measured else 0
                rate *= distance_factor(exchange, devices, shape.level, self.levels, near)
        return rate
