"""Where a job runs: the devices of each node, and how much of them it may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDevices(Record):
    """Devices of one node, by index.

    Attributes:
        node: name of the node.
        devices: indices from 0, in the order of the job's ranks.
    """

    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement(Record):
    """The devices of a job.

    Jobs that share devices have placements with equal `parts`: a group of jobs shares all of its
    devices or none, so that one slow neighbour slows all ranks of a job alike.

    Attributes:
        parts: nodes in the order of the job's ranks; a node may come more than once.
        share: fraction of each device that the job may use: 1 if it starts with the devices to
            itself, 1/n beside n - 1 other jobs. An executor limits a job to it where the device
            allows it (MPS, cgroup); what runs keeps the limit with which it started.
    """

    parts: tuple[NodeDevices, ...]
    share: float = 1.0

    @property
    def devices(self) -> int:
        """Number of devices, over all nodes."""
        return sum(len(part.devices) for part in self.parts)

    def describe(self) -> str:
        """Return the placement in short form, for example ``n0[0-3] n1[0,2]``."""
        return " ".join(f"{part.node}[{_ranges(part.devices)}]" for part in self.parts)


class Shape(NamedTuple):
    """What the rate of a job depends on in a placement, whichever nodes they are.

    Attributes:
        device_type: of all devices.
        per_node: number of devices on each node, descending.
        level: of the worst link between two of them: 0 inside a node, 1 between nodes of one
            switch, and so on.
    """

    device_type: str
    per_node: tuple[int, ...]
    level: int

    @property
    def devices(self) -> int:
        """Number of devices, over all nodes."""
        return sum(self.per_node)


def close_together(device_type: str, devices: int, node_devices: int) -> Shape:
    """Return the shape of devices on as few nodes as they need, below one switch.

    >>> close_together("v100", 12, 8)
    Shape(device_type='v100', per_node=(8, 4), level=1)
    """
    whole, rest = divmod(devices, node_devices)
    per_node = (node_devices,) * whole + ((rest,) if rest else ())
    return Shape(device_type, per_node, 0 if len(per_node) == 1 else 1)


def _ranges(indices: tuple[int, ...]) -> str:
    """Return ascending indices as ranges: ``0-3,6``."""
    texts: list[str] = []
    first = last = indices[0]
    for index in (*indices[1:], -1):
        if index == last + 1:
            last = index
            continue
        texts.append(str(first) if first == last else f"{first}-{last}")
        first = last = index
    return ",".join(texts)
