"""Free devices are those that nobody took, wherever a naive model says so."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.examples import examples
from support.scheduler_worlds import CLUSTERS

from paceline.scheduler.cluster import Cluster, Node
from paceline.scheduler.state.inventory import Inventory

UNEVEN = Cluster(
    nodes=tuple(
        Node(name=f"n{i}", device_type="gpu", devices=devices, switches=(f"s{i // 2}", "top"))
        for i, devices in enumerate((1, 2, 4, 4, 6, 3))
    )
)
SHAPES = {**CLUSTERS, "uneven": UNEVEN}


class InventoryMachine(RuleBasedStateMachine):
    """Takes, returns, losses, in any order; the model is a set of free devices by node."""

    @initialize(name=st.sampled_from(sorted(SHAPES)))
    def begin(self, name):
        self.cluster = SHAPES[name]
        self.inventory = Inventory(self.cluster)
        self.free = {i: set(range(node.devices)) for i, node in enumerate(self.cluster.nodes)}
        self.lost = set()
        self.taken = []
        self.kinds = list(self.cluster.device_counts())

    @rule(data=st.data(), count=st.integers(1, 20), level=st.sampled_from([None, 0, 1, 2, 3]))
    def take(self, data, count, level):
        kind = data.draw(st.sampled_from(self.kinds))
        parts = self.inventory.find(kind, count, max_level=level)
        free = [i for i in self.free if self.cluster.nodes[i].device_type == kind]
        if parts is None:
            fits_in_a_node = any(len(self.free[i]) >= count for i in free)
            assert not fits_in_a_node
            if level is None:
                assert sum(len(self.free[i]) for i in free) < count
            return
        self.follow(parts, kind, count)
        assert self.inventory.shape(parts).level <= (math.inf if level is None else level)
        if count <= max(len(self.free[i]) for i in free):
            assert len(parts) == 1
            ((index, _),) = parts
            enough = [len(self.free[i]) for i in free if len(self.free[i]) >= count]
            assert len(self.free[index]) == min(enough), "not the fullest node that suffices"
        self.keep(parts)

    @rule(data=st.data(), count=st.integers(1, 20))
    def take_whole_nodes(self, data, count):
        kind = data.draw(st.sampled_from(self.kinds))
        parts = self.inventory.find_whole(kind, count)
        whole = [
            node.devices
            for i, node in enumerate(self.cluster.nodes)
            if node.device_type == kind and i not in self.lost and len(self.free[i]) == node.devices
        ]
        assert (parts is None) == (sum(whole) < count)
        if parts is not None:
            self.follow(parts, kind, count)
            assert all(
                len(self.free[index]) == self.cluster.nodes[index].devices for index, _ in parts
            )
            self.keep(parts)

    def follow(self, parts, kind, count):
        assert sum(bits.bit_count() for _, bits in parts) == count
        assert list(parts) == sorted(parts)
        for index, bits in parts:
            devices = {d for d in range(bits.bit_length()) if bits >> d & 1}
            assert devices <= self.free[index]
            assert self.cluster.nodes[index].device_type == kind
        assert self.inventory.parts(self.inventory.devices(parts)) == parts

    def keep(self, parts):
        self.inventory.take(parts)
        for index, bits in parts:
            self.free[index] -= {d for d in range(bits.bit_length()) if bits >> d & 1}
        self.taken.append(parts)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data):
        parts = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.inventory.give_back(parts)
        for index, bits in parts:
            self.free[index] |= {d for d in range(bits.bit_length()) if bits >> d & 1}

    @rule(data=st.data())
    def lose_or_restore(self, data):
        index = data.draw(st.integers(0, len(self.cluster.nodes) - 1))
        count = self.cluster.nodes[index].devices
        if index in self.lost:
            self.inventory.restore(index)
            self.lost.discard(index)
            self.free[index] = set(range(count))
        elif len(self.free[index]) == count:
            self.inventory.remove(index)
            self.lost.add(index)
            self.free[index] = set()

    def teardown(self):
        if not hasattr(self, "cluster"):
            return
        for kind in self.kinds:
            nodes = [i for i, n in enumerate(self.cluster.nodes) if n.device_type == kind]
            assert self.inventory.free[kind] == sum(len(self.free[i]) for i in nodes)
            assert self.inventory.largest_free(kind) == max(len(self.free[i]) for i in nodes)
            usable = sum(self.cluster.nodes[i].devices for i in nodes if i not in self.lost)
            assert self.inventory.usable[kind] == usable
            assert self.inventory.emptied().free[kind] == usable
        for parts in self.taken:
            self.inventory.give_back(parts)
        fresh = Inventory(self.cluster)
        for index in self.lost:
            self.inventory.restore(index)
        assert self.inventory.free_bits == fresh.free_bits


InventoryMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=30)
test_free_devices_are_those_that_nobody_took = InventoryMachine.TestCase
