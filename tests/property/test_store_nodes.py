"""The state machines of a pack that is spread over nodes, each against what it must never do."""

import itertools
import math
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.store.serve import placement as placement_module
from paceline.store.serve.cache import Future, ShardCache
from paceline.store.serve.membership import (
    CopyShard,
    DropShard,
    Heard,
    Membership,
    Silent,
    TimePassed,
)
from paceline.store.serve.placement import place
from paceline.store.serve.staging import Staging

NODES = st.lists(
    st.text("abcdef0123", min_size=1, max_size=6), min_size=1, max_size=12, unique=True
)


@given(nodes=NODES, shards=st.integers(0, 200), replicas=st.integers(1, 4))
def test_each_shard_has_its_copies_on_different_nodes_in_balance(nodes, shards, replicas):
    placement = place(nodes, shards, replicas)
    copies = min(replicas, len(nodes))
    assert placement.owners.shape == (shards, copies)
    assert all(len(set(row)) == copies for row in placement.owners.tolist())
    most = math.ceil(shards * copies / len(nodes) * 1.05)
    assert all(len(placement.shards_of(node)) <= most for node in nodes)
    assert (place(reversed(nodes), shards, replicas).owners == placement.owners).all()


@given(count=st.integers(2, 12), replicas=st.integers(1, 3), lost=st.integers(0, 11))
def test_a_node_that_leaves_or_joins_moves_little_more_than_its_share(count, replicas, lost):
    nodes = [f"node{k}" for k in range(count)]
    shards = 400
    before = place(nodes, shards, replicas)
    after = place([name for name in nodes if name != nodes[lost % count]], shards, replicas)
    pairs = [
        set(map(before.owners_of(s).__getitem__, range(before.owners.shape[1])))
        for s in range(shards)
    ]
    moved = sum(len(set(after.owners_of(s)) - pairs[s]) for s in range(shards))
    share = shards * min(replicas, count) / count
    assert moved <= 2.5 * share + 8  # without a bound on the load: exactly the share


@given(nodes=NODES, shards=st.integers(1, 60), replicas=st.integers(1, 3), data=st.data())
def test_shards_that_are_everywhere_take_no_room_from_the_others(nodes, shards, replicas, data):
    everywhere = frozenset(data.draw(st.sets(st.integers(0, shards - 1))))
    placement = place(nodes, shards, replicas, everywhere)
    for shard in range(shards):
        owners = placement.owners_of(shard)
        assert len(set(owners)) == len(owners)
        assert len(owners) == (len(nodes) if shard in everywhere else min(replicas, len(nodes)))
        assert all(shard in placement.shards_of(node) for node in owners)
    copies = min(replicas, len(nodes))
    most = math.ceil((shards - len(everywhere)) * copies / len(nodes) * 1.05)
    spread = [set(placement.shards_of(node).tolist()) - everywhere for node in nodes]
    assert all(len(own) <= most for own in spread)


@given(count=st.integers(17, 60), shards=st.integers(1, 80), replicas=st.integers(1, 3))
def test_looking_at_few_nodes_places_as_looking_at_all_does(count, shards, replicas):
    nodes = [f"node{k}" for k in range(count)]
    few = place(nodes, shards, replicas).owners
    with mock.patch.object(placement_module, "_SPARE", count):
        assert (place(nodes, shards, replicas).owners == few).all()


def test_a_data_set_that_nearly_fills_the_nodes_fits():
    placement = place([f"node{k}" for k in range(8)], 1820, 1)  # 455 GB in shards of 256 MB
    most = max(len(placement.shards_of(node)) for node in placement.nodes)
    assert most * 0.25 <= 60


class Cluster:
    """Nodes with one membership each, which hear of each other in rounds."""

    def __init__(self, count, shards, replicas):
        self.names = [f"n{k}" for k in range(count)]
        self.members = {name: self.member(name, shards, replicas) for name in self.names}
        self.down = set()
        self.island = set()  # nodes that only hear each other
        self.source_reads = []
        self.now_s = 0.0

    def member(self, name, shards, replicas):
        others = [other for other in self.names if other != name]
        membership = Membership(
            self_name=name, peers=others, shard_count=shards, replicas=replicas, grace_s=5
        )
        staging = Staging(self_name=name, shard_bytes=[100] * shards, at_once=3)
        return membership, staging

    def round(self):
        self.now_s += 2
        up = [name for name in self.names if name not in self.down]
        for name in up:
            membership, staging = self.members[name]
            actions = membership.handle(TimePassed(), self.now_s)
            for other in self.names:
                if other == name:
                    continue
                held = frozenset(self.members[other][0].held)
                is_cut = other in self.down or (name in self.island) != (other in self.island)
                event = Silent(node=other) if is_cut else Heard(node=other, held=held)
                actions = membership.handle(event, self.now_s)
            staging.want(action for action in actions if isinstance(action, CopyShard))
            for stage in staging.start(membership.placement, self.now_s):
                if stage.peer in self.down:
                    staging.failed(stage, self.now_s)
                    continue
                if not stage.peer:
                    self.source_reads.append(stage.shard)
                membership.held.add(stage.shard)
                staging.done(stage.shard)
            for action in actions:
                if isinstance(action, DropShard):
                    membership.held.discard(action.shard)

    def copies(self, shard):
        return [n for n in self.names if n not in self.down and shard in self.members[n][0].held]


@settings(max_examples=examples(25))
@given(
    count=st.integers(2, 5),
    shards=st.integers(1, 16),
    replicas=st.integers(1, 3),
    lost=st.integers(0, 4),
)
def test_shards_are_staged_once_and_replicated_again_after_a_loss(count, shards, replicas, lost):
    cluster = Cluster(count, shards, replicas)
    for _ in range(16):
        cluster.round()
    assert sorted(cluster.source_reads) == list(range(shards))  # each once, by one node
    copies = min(replicas, count)
    assert all(len(cluster.copies(shard)) == copies for shard in range(shards))

    cluster.source_reads.clear()
    lonely = {s for s in range(shards) if cluster.copies(s) == [cluster.names[lost % count]]}
    cluster.down.add(cluster.names[lost % count])
    for _ in range(16):
        cluster.round()
        # At no time is there no copy of what had more than one.
        assert all(cluster.copies(shard) for shard in set(range(shards)) - lonely)
    left = min(replicas, count - 1)
    assert all(len(cluster.copies(shard)) == left for shard in range(shards))
    assert set(cluster.source_reads) == lonely  # only what had no replica

    cluster.down.clear()  # it comes back with what it had
    for _ in range(16):
        cluster.round()
    assert all(len(cluster.copies(shard)) == copies for shard in range(shards))


class SlowCluster(Cluster):
    """Nodes whose copies take until the next round, and whose news are those of the last one."""

    def __init__(self, count, shards, replicas):
        super().__init__(count, shards, replicas)
        self.shards, self.replicas = shards, replicas
        self.running = []
        self.said = {name: frozenset() for name in self.names}

    def round(self):
        self.now_s += 1
        running, self.running = self.running, []
        for name, membership, staging, stage in running:
            if name in self.down or membership is not self.members[name][0]:
                continue  # it was killed meanwhile
            peer_held = self.members[stage.peer][0].held if stage.peer else ()
            if stage.peer and (stage.peer in self.down or stage.shard not in peer_held):
                staging.failed(stage, self.now_s)
                continue
            membership.held.add(stage.shard)
            staging.done(stage.shard)
        for name in self.names:
            if name not in self.down:
                self.beat(name)
        self.said = {name: frozenset(self.members[name][0].held) for name in self.names}

    def beat(self, name):
        membership, staging = self.members[name]
        for other in self.names:
            if other != name:
                is_down = other in self.down
                event = Silent(node=other) if is_down else Heard(node=other, held=self.said[other])
                membership.note(event, self.now_s)
        actions = membership.handle(TimePassed(), self.now_s)
        wanted = [action for action in actions if isinstance(action, CopyShard)]
        staging.want(copy for copy in wanted if copy.shard not in membership.held)
        for action in actions:
            if isinstance(action, DropShard):
                membership.held.discard(action.shard)
        for stage in staging.start(membership.placement, self.now_s):
            self.running.append((name, membership, staging, stage))

    def kill(self, name, *, is_wiped):
        held = self.members[name][0].held
        self.down.add(name)
        self.members[name] = self.member(name, self.shards, self.replicas)  # a new process
        self.members[name][0].held |= set() if is_wiped else held
        self.said[name] = frozenset(self.members[name][0].held)

    def is_whole(self):
        copies = min(self.replicas, len(self.names))
        return all(len(self.copies(shard)) == copies for shard in range(self.shards))

    def settle(self, rounds):
        for _ in range(rounds):
            if self.is_whole():
                return
            self.round()
        assert self.is_whole(), {name: self.members[name][0].held for name in self.names}


@settings(max_examples=examples(60))
@given(
    count=st.integers(2, 4),
    shards=st.integers(1, 16),
    kills=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 12)), max_size=12),
)
def test_all_copies_are_there_again_after_each_kill(count, shards, kills):
    """As `paceline torture cluster` kills: the next node when the last one has its share again."""
    cluster = SlowCluster(count, shards, 2)
    cluster.settle(60)
    for victim, is_wiped, rounds_down in kills:
        name = cluster.names[victim % count]
        cluster.kill(name, is_wiped=is_wiped)
        for _ in range(rounds_down):  # shorter, or longer, than the others wait
            cluster.round()
            assert all(cluster.copies(shard) for shard in range(shards))
        cluster.down.clear()
        cluster.settle(60)
        assert len(cluster.source_reads) <= shards


@settings(max_examples=examples(25))
@given(
    count=st.integers(2, 5),
    shards=st.integers(1, 16),
    replicas=st.integers(1, 3),
    island=st.sets(st.integers(0, 4)),
)
def test_a_partition_heals(count, shards, replicas, island):
    cluster = Cluster(count, shards, replicas)
    for _ in range(16):
        cluster.round()
    cluster.island = {cluster.names[node] for node in island if node < count}
    sides = [cluster.island, set(cluster.names) - cluster.island]
    for _ in range(16):
        cluster.round()
    for side in filter(None, sides):  # each side has all shards, as often as it has nodes for them
        for shard in range(shards):
            held = side & set(cluster.copies(shard))
            assert len(held) == min(replicas, len(side))
    cluster.island = set()
    for _ in range(16):
        cluster.round()
        assert all(cluster.copies(shard) for shard in range(shards))
    copies = min(replicas, count)
    assert all(len(cluster.copies(shard)) == copies for shard in range(shards))


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    rate=st.integers(1, 50),
    steps=st.lists(st.floats(0.1, 5), min_size=1, max_size=30),
)
def test_the_source_is_read_no_faster_than_its_limit(sizes, rate, steps):
    staging = Staging(
        self_name="a", shard_bytes=sizes, source_bytes_per_s=rate, burst_bytes=0, at_once=99
    )
    placement = place(["a"], len(sizes), 1)
    staging.want(CopyShard(shard=shard, holders=()) for shard in range(len(sizes)))
    now_s, read, largest = 0.0, 0, max(sizes)
    for step_s in [0.0, *steps]:
        now_s += step_s
        for stage in staging.start(placement, now_s):
            read += sizes[stage.shard]
            staging.done(stage.shard)
        assert read <= rate * now_s + largest + 1e-6


def misses(uses, size, policy):
    """Return how often shards of one size were not cached, when `policy` says what to evict."""
    cached, count = [], 0
    for at, shard in enumerate(uses):
        if shard in cached:
            cached.remove(shard)
        else:
            count += 1
            if len(cached) == size:
                cached.remove(policy(cached, at))
        cached.append(shard)
    return count


def fewest_misses(uses, size):
    """Return the fewest possible, by trying everything."""
    states = {frozenset(): 0}
    for shard in uses:
        following = {}
        for cached, cost in states.items():
            if shard in cached:
                options = [(cached, cost)]
            else:
                subsets = itertools.combinations(cached, min(len(cached), size - 1))
                options = [(frozenset({*kept, shard}), cost + 1) for kept in subsets]
                options.append((cached, cost + 1))
            for state, total in options:
                following[state] = min(total, following.get(state, total))
        states = following
    return min(states.values())


@given(uses=st.lists(st.integers(0, 5), max_size=16), size=st.integers(1, 4))
def test_no_other_cache_misses_less(uses, size):
    cache = ShardCache(
        capacity_bytes=size * 10, shard_bytes=[10] * 6, future=Future(np.array(uses, np.int64))
    )
    count = 0
    for at, shard in enumerate(uses):
        count += shard not in cache.cached
        cache.admit(shard, at + 1)
        assert cache.used_bytes <= cache.capacity_bytes
    assert count == fewest_misses(uses, size)
    assert count <= misses(uses, size, lambda cached, _: cached[0])  # least recently used


@given(
    uses=st.lists(st.integers(0, 9), max_size=40),
    sizes=st.lists(st.integers(1, 30), min_size=10, max_size=10),
    capacity=st.integers(1, 60),
    ahead=st.integers(0, 40),
)
def test_prefetching_follows_the_order_of_use_within_the_bound(uses, sizes, capacity, ahead):
    future = Future(np.array(uses, np.int64))
    cache = ShardCache(capacity_bytes=capacity, shard_bytes=sizes, future=future)
    fetched = []
    for shard, evicted in cache.prefetch(0, ahead):
        assert cache.used_bytes <= capacity
        assert not set(evicted) & set(fetched)
        fetched.append(shard)
    assert fetched == list(dict.fromkeys(uses[:ahead]))[: len(fetched)]
    assert cache.used_bytes <= capacity
    assert set(fetched) == cache.cached  # nothing that is used sooner was evicted again


def test_a_copy_that_fails_again_and_again_is_tried_ever_more_rarely():
    staging = Staging(self_name="a", shard_bytes=[1], retry_s=1.0)
    placement = place(["a"], 1, 1)
    tried = []
    for now_s in range(200):
        staging.want([CopyShard(shard=0, holders=())])
        for stage in staging.start(placement, now_s):
            tried.append(now_s)
            staging.failed(stage, now_s)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 123, 183]  # twice as long, at most a minute


def test_what_a_reader_asks_for_is_copied_first():
    staging = Staging(self_name="a", shard_bytes=[1] * 5, at_once=1)
    placement = place(["a"], 5, 1)
    staging.want(CopyShard(shard=shard, holders=()) for shard in range(5))
    order = []
    for asked in (3, 1, 1, 9, 0):  # 9 is not wanted here
        staging.ask(asked)
        (stage,) = staging.start(placement, 0.0)
        staging.done(stage.shard)
        order.append(stage.shard)
    assert order == [3, 1, 0, 2, 4]
