"""Which devices are free, and which to take: best fit by buddy cells of the topology.

A node's devices are the bits of an integer. Nodes of one type are kept in buckets by their number
of free devices, so that the node with the fewest that suffice is found without a search:

    v100   bucket 0: n3        bucket 2: n1        bucket 8: n0 n2 n4
           (full)                                  (whole nodes, also counted by switch)

A job of up to one node's devices takes the tightest node, and in it an aligned block (devices 4-7
rather than 3-6), so that pairs and quads with fast links stay whole for others. Among equally tight
nodes, the caller's preferred ones come first: those that hold the job's data. A wider job takes
whole nodes below one switch, the switch with the fewest whole nodes that suffice; then below the
next level; only then devices from wherever they are free.
Source: H. Zhao et al., HiveD: Sharing a GPU Cluster for Deep Learning with Guarantees, OSDI 2020
(cells by topology level, best fit); K. Knowlton, A Fast Storage Allocator, CACM 8(10), 1965.
Cost: constant for jobs within a node, one pass over the switches for wider ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from paceline.scheduler.placement import NodeDevices, Shape, close_together

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from paceline.scheduler.cluster import Cluster

Parts: TypeAlias = tuple[tuple[int, int], ...]  # node index, bits of its devices; by node index


class Inventory:
    """The free devices of a cluster; knows nothing of jobs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.nodes = cluster.nodes
        self.index = {node.name: index for index, node in enumerate(cluster.nodes)}
        self.free_bits = [0] * len(cluster.nodes)
        self.total = cluster.device_counts()
        self.free = dict.fromkeys(self.total, 0)
        self.usable = dict.fromkeys(self.free, 0)
        self.lost = set(range(len(cluster.nodes)))
        self.lost_bits = [0] * len(cluster.nodes)  # of devices that are lost by themselves
        self.largest_node = cluster.largest_nodes()
        # Nodes of one type are taken to be alike: the smallest known memory counts.
        self.memory_bytes = dict.fromkeys(self.free, 0)
        for node in cluster.nodes:
            kind = node.device_type
            if node.memory_bytes:
                known = self.memory_bytes[kind] or node.memory_bytes
                self.memory_bytes[kind] = min(known, node.memory_bytes)
        # Dicts serve as sets with an order, so that equal inputs give equal choices.
        self._buckets: dict[str, list[dict[int, None]]] = {
            kind: [{} for _ in range(size + 1)] for kind, size in self.largest_node.items()
        }
        depth = max(len(node.switches) for node in cluster.nodes)
        self._depth = depth
        self._most_below = {kind: self._most_devices(kind) for kind in self.free}
        self._whole: list[dict[str, dict[str, dict[int, None]]]] = [
            {kind: {} for kind in self.free} for _ in range(depth)
        ]
        for index in range(len(cluster.nodes)):
            self.restore(index)

    def restore(self, index: int) -> None:
        """Let a node's devices be used (again); all of them are free."""
        node = self.nodes[index]
        self.lost.discard(index)
        bits = self._usable_bits(index)
        self.usable[node.device_type] += bits.bit_count()
        self._buckets[node.device_type][0][index] = None
        self._set_free(index, bits)

    def remove(self, index: int) -> None:
        """Take a node out: all of its devices must be free."""
        node = self.nodes[index]
        bits = self._usable_bits(index)
        assert self.free_bits[index] == bits, "jobs hold devices of this node"
        self._set_free(index, 0)
        del self._buckets[node.device_type][0][index]
        self.usable[node.device_type] -= bits.bit_count()
        self.lost.add(index)

    def remove_devices(self, index: int, bits: int) -> None:
        """Take devices of a node out: they must be free, or the node lost."""
        self.lost_bits[index] |= bits
        if index not in self.lost:
            assert not bits & ~self.free_bits[index], "jobs hold these devices"
            self.usable[self.nodes[index].device_type] -= bits.bit_count()
            self._set_free(index, self.free_bits[index] & ~bits)

    def restore_devices(self, index: int, bits: int) -> None:
        """Let lost devices of a node be used again."""
        assert not bits & ~self.lost_bits[index], "these devices are not lost"
        self.lost_bits[index] &= ~bits
        if index not in self.lost:
            self.usable[self.nodes[index].device_type] += bits.bit_count()
            self._set_free(index, self.free_bits[index] | bits)

    def take(self, parts: Parts) -> None:
        """Mark free devices as taken."""
        for index, bits in parts:
            assert self.free_bits[index] & bits == bits, "a device would be taken twice"
            self._set_free(index, self.free_bits[index] & ~bits)

    def give_back(self, parts: Parts) -> None:
        """Mark taken devices as free."""
        for index, bits in parts:
            assert not self.free_bits[index] & bits, "a free device would be given back"
            self._set_free(index, self.free_bits[index] | bits)

    def emptied(self) -> Inventory:
        """Return the same nodes with all usable devices free, to plan on."""
        empty = Inventory(self.cluster)
        for index, bits in enumerate(self.lost_bits):
            if bits:
                empty.remove_devices(index, bits)
        for index in sorted(self.lost):
            empty.remove(index)
        return empty

    def memory_suffices(self, memory_bytes: int, device_type: str) -> bool:
        """Return whether a device has so much memory, as far as that is known."""
        return memory_bytes <= (self.memory_bytes[device_type] or memory_bytes)

    def find_whole(self, device_type: str, count: int) -> Parts | None:
        """Return devices for a job on nodes of which nobody holds a device, or None.

        Args:
            device_type: of all devices.
            count: how many; the rest of the last node stays free.
        """
        parts: list[tuple[int, int]] = []
        for bucket in reversed(self._buckets.get(device_type, [])[1:]):
            for index in bucket:
                bits = self.free_bits[index]
                if bits.bit_count() < self.nodes[index].devices:
                    continue
                parts.append((index, _block(bits, min(count, bits.bit_count()))))
                count -= parts[-1][1].bit_count()
                if not count:
                    return tuple(sorted(parts))
        return None

    def find(
        self,
        device_type: str,
        count: int,
        *,
        max_level: int | None = None,
        prefer: Collection[int] = (),
    ) -> Parts | None:
        """Return free devices for a job, or None.

        Args:
            device_type: of all devices.
            count: how many.
            max_level: the highest level of a link between two of them, see `Shape.level`; None if
                any will do.
            prefer: nodes to take among equally good ones, by index.
        """
        if count > self.free.get(device_type, 0):
            return None
        size = self.largest_node[device_type]
        if count <= size:
            for bucket in self._buckets[device_type][count:]:
                if bucket:
                    liked = (index for index in prefer if index in bucket)
                    index = next(liked, None)
                    if index is None:
                        index = next(iter(bucket))
                    return ((index, _block(self.free_bits[index], count)),)
        top = self._depth + 1 if max_level is None else max_level
        if top < 1:
            return None
        return self._below_one_switch(device_type, count, top, prefer) or (
            self._anywhere(device_type, count) if top > self._depth else None
        )

    def shape(self, parts: Parts) -> Shape:
        """Return what the rate of a job on these devices depends on."""
        counts = sorted((bits.bit_count() for _, bits in parts), reverse=True)
        first = self.nodes[parts[0][0]]
        return Shape(first.device_type, tuple(counts), self._level(parts))

    def closest(self, device_type: str, devices: int) -> Shape:
        """Return the shape of devices as close together as they can be when all are free."""
        shape = close_together(device_type, devices, self.largest_node[device_type])
        if shape.level == 0:
            return shape
        for level, most in enumerate(self._most_below[device_type], 1):
            if devices <= most:
                return shape._replace(level=level)
        return shape._replace(level=self._depth + 1 if self._depth else 1)

    def is_close(self, shape: Shape) -> bool:
        """Return whether devices of a shape are as close together as their number can be."""
        return shape.level <= self.closest(shape.device_type, shape.devices).level

    def devices(self, parts: Parts) -> tuple[NodeDevices, ...]:
        """Return the devices by name of their node."""
        return tuple(
            NodeDevices(node=self.nodes[index].name, devices=tuple(_bits(bits)))
            for index, bits in parts
        )

    def parts(self, devices: tuple[NodeDevices, ...]) -> Parts:
        """Return devices by index of their node; the opposite of `devices`."""
        bits: dict[int, int] = {}
        for part in devices:
            index = self.index[part.node]
            bits[index] = bits.get(index, 0) | bits_of(part.devices)
        return tuple(sorted(bits.items()))

    def largest_free(self, device_type: str) -> int:
        """Return the largest number of free devices on one node of a type."""
        buckets = self._buckets.get(device_type, [])
        return max((count for count, nodes in enumerate(buckets) if nodes), default=0)

    def _most_devices(self, device_type: str) -> list[int]:
        """Return the most devices of a type below one switch, for each level from the nearest."""
        most = []
        for level in range(self._depth):
            below: dict[str, int] = {}
            for node in self.nodes:
                if node.device_type == device_type and level < len(node.switches):
                    switch = node.switches[level]
                    below[switch] = below.get(switch, 0) + node.devices
            most.append(max(below.values(), default=0))
        return most

    def _level(self, parts: Parts) -> int:
        if len(parts) == 1:
            return 0
        switches = [self.nodes[index].switches for index, _ in parts]
        for level in range(min(map(len, switches))):
            if len({path[level] for path in switches}) == 1:
                return level + 1
        return self._depth + 1 if self._depth else 1

    def _below_one_switch(
        self, device_type: str, count: int, top: int, prefer: Collection[int]
    ) -> Parts | None:
        """Return whole nodes, and a part of another one for the rest, below the fullest switch."""
        size = self.largest_node[device_type]
        wanted, rest = divmod(count, size)
        for level in range(min(top, self._depth)):
            fitting = [
                nodes
                for nodes in self._whole[level][device_type].values()
                if len(nodes) >= wanted + bool(rest)
            ]
            if fitting:
                nodes = min(fitting, key=len)
                return self._whole_nodes(nodes, wanted, rest, prefer)
        if not self._depth:
            nodes = self._buckets[device_type][size]
            if len(nodes) >= wanted + bool(rest):
                return self._whole_nodes(nodes, wanted, rest, prefer)
        return None

    def _whole_nodes(
        self, free: Collection[int], wanted: int, rest: int, prefer: Collection[int]
    ) -> Parts:
        nodes = sorted(free, key=lambda index: index not in prefer) if prefer else list(free)
        parts = [(index, self.free_bits[index]) for index in nodes[:wanted]]
        if rest:
            index = nodes[wanted]
            parts.append((index, _block(self.free_bits[index], rest)))
        return tuple(sorted(parts))

    def _anywhere(self, device_type: str, count: int) -> Parts:
        """Return free devices of the emptiest nodes."""
        parts: list[tuple[int, int]] = []
        for bucket in reversed(self._buckets[device_type][1:]):
            for index in bucket:
                bits = self.free_bits[index]
                if bits.bit_count() > count:
                    bits = _block(bits, count)
                parts.append((index, bits))
                count -= bits.bit_count()
                if not count:
                    return tuple(sorted(parts))
        raise AssertionError("the count of free devices is wrong")

    def _usable_bits(self, index: int) -> int:
        return ((1 << self.nodes[index].devices) - 1) & ~self.lost_bits[index]

    def _set_free(self, index: int, bits: int) -> None:
        node = self.nodes[index]
        before, after = self.free_bits[index].bit_count(), bits.bit_count()
        self.free_bits[index] = bits
        buckets = self._buckets[node.device_type]
        del buckets[before][index]
        buckets[after][index] = None
        self.free[node.device_type] += after - before
        size = self.largest_node[node.device_type]
        if (before == size) != (after == size):
            for level, switch in enumerate(node.switches):
                whole = self._whole[level][node.device_type].setdefault(switch, {})
                if after == size:
                    whole[index] = None
                else:
                    del whole[index]


def bits_of(devices: Iterable[int]) -> int:
    """Return indices of devices as bits."""
    return sum(1 << device for device in devices)


def _block(free: int, count: int) -> int:
    """Return `count` of the free bits: an aligned block if there is one, else the lowest ones."""
    size = 1 << (count - 1).bit_length()
    block = (1 << count) - 1
    for start in range(0, free.bit_length(), size):
        if (free >> start) & block == block:
            return block << start
    return lowest_bits(free, count)


def lowest_bits(bits: int, count: int) -> int:
    """Return the lowest `count` of some bits."""
    chosen = 0
    for _ in range(count):
        lowest = bits & -bits
        chosen |= lowest
        bits ^= lowest
    return chosen


def _bits(bits: int) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
