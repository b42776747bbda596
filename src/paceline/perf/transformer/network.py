"""Seconds of collectives and messages between the ranks of a large job, over two levels of links.

A `RankGroup` says how the ranks of one axis of the mesh lie on nodes, and how many such groups use
a node's links at the same time. Costs are those of `paceline.schedules.cost` for rings in closed
form, since a replay of 1,024 ranks has two million transfers; a property test pins the two to each
other. A step of a ring lasts as long as its slowest message, each of which takes ``latency + bytes
on the shared link / bandwidth``.

Only links of the machine are used, and a plan on several nodes needs a link of the level
``network``: the figures of shared memory or of loopback never stand for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.machine import Efficiency, Link, Machine
    from paceline.core.plan import Mesh

NETWORK = "network"
OUTSIDE_LEVELS = (NETWORK, "host", "loopback")


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that take part in a collective.

    Attributes:
        ranks: in the group.
        per_node: of them on each of its nodes.
        concurrent: groups that use a node's links at the same time, this one included.
    """

    ranks: int
    per_node: int
    concurrent: int

    @property
    def nodes(self) -> int:
        """Nodes over which the group is spread."""
        return -(-self.ranks // self.per_node)


@dataclass(frozen=True, slots=True)
class LevelCost:
    """A link as a group of ranks sees it: seconds of latency, and per byte.

    Attributes:
        latency_s: of an empty message.
        s_per_byte: of all that share the link.
        shared: whether the devices of a node do.
        adapters: of the node, of which a message uses one.
    """

    latency_s: float
    s_per_byte: float
    shared: bool
    adapters: int = 1


def network_link(machine: Machine, nodes: int) -> Link:
    """Return the link between nodes.

    Raises:
        UsageError: the machine has none, which a plan on `nodes` nodes needs.
    """
    link = machine.link(NETWORK)
    if link is None:
        raise UsageError(
            f"a plan on {nodes} nodes needs a link between nodes",
            where=f"{machine.name}: links",
            why=f"its levels: {', '.join(link.level for link in machine.links) or 'none'}",
            fix="Add a link of the level 'network' to the machine file, or probe two nodes",
        )
    return link


def fabric_taper(machine: Machine, nodes: int) -> float:
    """Return the part of a link's bandwidth that is left between groups of the machine's fabric."""
    fabric = machine.fabric
    if fabric and fabric.taper and 0 < fabric.group_nodes < nodes:
        return fabric.taper.value
    return 1.0


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a machine at the rates that collectives reach.

    Attributes:
        inside: between devices of a node; None if there is none.
        across: between nodes; None if there is none.
        node_devices: devices of a node.
    """

    inside: LevelCost | None
    across: LevelCost | None
    node_devices: int

    @classmethod
    def of(cls, machine: Machine, efficiency: Efficiency, nodes: int) -> Network:
        """Return the network of a job on `nodes` nodes.

        Between groups of a fabric the bandwidth is that of its taper.

        Raises:
            UsageError: the job needs more than one node and the machine has no network.
        """
        network = network_link(machine, nodes) if nodes > 1 else machine.link(NETWORK)
        inside = machine.link(inside_level(machine))
        return cls(
            inside=_level(inside, efficiency.link.value),
            across=_level(network, efficiency.network.value * fabric_taper(machine, nodes)),
            node_devices=max(1, machine.devices[0].count),
        )

    def group(self, size: int, stride: int) -> RankGroup:
        """Return the ranks of an axis of which neighbours lie `stride` ranks apart."""
        per_node = max(1, min(size, self.node_devices // max(1, stride)))
        return RankGroup(size, per_node, max(1, self.node_devices // per_node))

    def ring_step_s(self, group: RankGroup, size_bytes: float) -> float:
        """Return the seconds in which each rank of a ring passes `size_bytes` to the next one."""
        steps = []
        if group.per_node > 1 and self.inside is not None:
            sharing = (group.per_node - (group.nodes > 1)) * group.concurrent
            moved = size_bytes * (sharing if self.inside.shared else 1)
            steps.append(self.inside.latency_s + moved * self.inside.s_per_byte)
        if group.nodes > 1:
            assert self.across is not None
            moved = size_bytes * (group.concurrent if self.across.shared else 1)
            steps.append(self.across.latency_s + moved * self.across.s_per_byte)
        return max(steps, default=0.0)

    def all_gather_s(self, group: RankGroup, size_bytes: float) -> float:
        """Return the seconds of an all-gather (or reduce-scatter) of a result of `size_bytes`."""
        steps = group.ranks - 1
        return steps * self.ring_step_s(group, size_bytes / group.ranks) if steps else 0.0

    def all_reduce_s(self, group: RankGroup, size_bytes: float) -> float:
        """Return the seconds of an all-reduce: one ring, or rings on two levels if faster.

        On two levels a node reduces and scatters, each shard is reduced between nodes, and a node
        gathers; the shards' rings share the node's links.
        """
        flat_s = 2 * self.all_gather_s(group, size_bytes)
        if group.nodes == 1 or group.per_node == 1:
            return flat_s
        within = RankGroup(group.per_node, group.per_node, group.concurrent)
        between = RankGroup(group.nodes, 1, group.concurrent * group.per_node)
        shard_bytes = size_bytes / group.per_node
        levels_s = 2 * self.all_gather_s(within, size_bytes)
        levels_s += 2 * self.all_gather_s(between, shard_bytes)
        return min(flat_s, levels_s)

    def boundary_s(self, stage: int, stride: int, size_bytes: float) -> float:
        """Return the seconds of a message from a stage of the pipeline to the next one.

        All ranks of the stage on a node send at the same time, each over one adapter. Stages that
        share a node send over the link between its devices.

        Args:
            stage: rank of the pipeline that sends.
            stride: ranks of a stage.
            size_bytes: that each of them sends.
        """
        first = stage * stride // self.node_devices
        last = ((stage + 1) * stride) // self.node_devices
        level = self.inside if first == last else self.across
        if level is None:
            return 0.0
        senders = max(min(stride, self.node_devices), level.adapters) if level.shared else 1
        return level.latency_s + size_bytes * level.s_per_byte * senders


def inside_level(machine: Machine) -> str:
    """Return the level of the links between devices of a node; ``node`` if there is none."""
    levels = (link.level for link in machine.links if link.level not in OUTSIDE_LEVELS)
    return next(levels, "node")


def _level(link: Link | None, efficiency: float) -> LevelCost | None:
    if link is None:
        return None
    bandwidth = link.bandwidth_bytes_per_s.value * efficiency
    shared = link.sharing in ("node", "all")
    return LevelCost(link.latency_s.value, 1 / bandwidth, shared, link.adapters)


def strides(mesh: Mesh) -> dict[str, int]:
    """Return how far apart neighbours of each axis are: tensor, context, data, then pipeline.

    Source: Narayanan et al., SC 2021, section 3: tensor-parallel ranks lie closest together, stages
    of the pipeline farthest apart.
    """
    return {
        "tensor": 1,
        "context": mesh.tensor,
        "data": mesh.tensor * mesh.context,
        "pipeline": mesh.tensor * mesh.context * mesh.data,
    }
