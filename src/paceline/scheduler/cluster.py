"""The devices that jobs compete for: nodes, device types, and the switches between nodes.

    Cluster
      nodes     n0 (8 x v100, leaf0, pod0)   n1 (8 x v100, leaf0, pod0)   n2 (8 x k80, leaf1, pod0)
      levels    device, node, switch, ...    a link for each step up: between two devices of a node,
                                             two nodes of a switch, two switches of the next one

Two nodes are connected at the first level at which they share a switch; nodes that share none are
connected at the last level.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.record import Record

_GROUP = re.compile(r"(?:(?P<type>[A-Za-z][\w.-]*)=)?(?P<nodes>\d+)x(?P<devices>\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Level(Record):
    """A link between devices of a cluster, by how far up its switches the way goes.

    Attributes:
        name: for example ``node``, ``leaf`` or ``spine``.
        latency_s: of one message.
        bandwidth_bytes_per_s: of one device's share of the link.
    """

    name: str
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Node(Record):
    """A machine of the cluster, with devices of one type.

    Attributes:
        name: unique in the cluster.
        device_type: for example ``v100``, or ``cpu`` for CPU slots.
        devices: how many.
        memory_bytes: of one device; 0 if it is not known and never a limit.
        switches: that the node is below, from the nearest to the top; may be empty.
    """

    name: str
    device_type: str
    devices: int
    memory_bytes: int = 0
    switches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(Record):
    """Nodes, and the links between their devices.

    Attributes:
        nodes: at least one.
        levels: the link inside a node, then between nodes of one switch, and so on upwards; may be
            empty if the distance of devices makes no difference.
    """

    nodes: tuple[Node, ...]
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a cluster needs at least one node", fix="Name its nodes")
        for name, count in Counter(node.name for node in self.nodes).items():
            if count > 1:
                raise ConfigError(
                    f"{count} nodes are named '{name}'", fix="Give each node a name of its own"
                )
        for node in self.nodes:
            if node.devices < 1:
                raise ConfigError(
                    f"node '{node.name}' has {node.devices} devices", fix="Give it at least one"
                )

    def device_counts(self) -> dict[str, int]:
        """Return the number of devices by type, types in the order of the nodes."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node.device_type] = counts.get(node.device_type, 0) + node.devices
        return counts

    def largest_nodes(self) -> dict[str, int]:
        """Return the most devices of a node by type, types in the order of the nodes."""
        largest: dict[str, int] = {}
        for node in self.nodes:
            largest[node.device_type] = max(largest.get(node.device_type, 0), node.devices)
        return largest

    @classmethod
    def of_text(cls, text: str, *, switch_nodes: int = 0) -> Cluster:
        """Return the cluster that a short description names.

        Args:
            text: groups of nodes, ``[type=]NODESxDEVICES``, separated by commas.
            switch_nodes: consecutive nodes of a group that share a switch; 0: all.

        Raises:
            ConfigError: the description cannot be read.

        >>> Cluster.of_text("v100=2x4,k80=3x8").device_counts()
        {'v100': 8, 'k80': 24}
        """
        nodes: list[Node] = []
        named: Counter[str] = Counter()  # nodes so far, by type: groups of one type are numbered on
        for index, part in enumerate(text.split(",")):
            match = _GROUP.match(part.strip())
            if not match:
                raise ConfigError(
                    f"'{part}' does not describe nodes",
                    where=f"cluster '{text}'",
                    fix="Write [type=]NODESxDEVICES, for example 16x4 or v100=2x4,k80=3x8",
                )
            device_type = match["type"] or "gpu"
            for number in range(int(match["nodes"])):
                leaf = f"leaf{index}.{number // switch_nodes}" if switch_nodes else f"leaf{index}"
                name = f"{device_type}-" if match["type"] else "n"
                nodes.append(
                    Node(
                        name=f"{name}{named[name]}",
                        device_type=device_type,
                        devices=int(match["devices"]),
                        switches=(leaf,),
                    )
                )
                named[name] += 1
        return cls(nodes=tuple(nodes))
