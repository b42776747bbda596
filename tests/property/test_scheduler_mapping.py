"""Ranks are mapped to devices as cheaply as any enumeration finds."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.core.errors import ConfigError, UsageError
from paceline.scheduler.cluster import Cluster, Level
from paceline.scheduler.job import Job
from paceline.scheduler.placement import NodeDevices
from paceline.scheduler.rates.model import RateModel
from paceline.scheduler.state.mapping import (
    distances,
    map_ranks,
    mapping_cost,
    mesh_traffic,
    rank_devices,
)
from paceline.scheduler.state.state import State

LEVELS = (
    Level(name="nvlink", latency_s=1e-6, bandwidth_bytes_per_s=100e9),
    Level(name="leaf", latency_s=5e-6, bandwidth_bytes_per_s=10e9),
    Level(name="spine", latency_s=1e-5, bandwidth_bytes_per_s=5e9),
)


def least_cost(traffic, distance):
    """Return the least cost of all mappings: the oracle."""
    places = np.array(list(itertools.permutations(range(len(distance)), len(traffic))))
    cost = np.zeros(len(places))
    for i, j in itertools.product(range(len(traffic)), repeat=2):
        cost += traffic[i, j] * distance[places[:, i], places[:, j]]
    return cost.min()


def cluster_distance(per_node, *, switch_nodes=2):
    cluster = Cluster.of_text(f"{len(per_node)}x8", switch_nodes=switch_nodes)
    cluster = Cluster(nodes=cluster.nodes, levels=LEVELS)
    placed = [
        NodeDevices(node=f"n{index}", devices=tuple(range(count)))
        for index, count in enumerate(per_node)
    ]
    return distances(cluster, placed)


def training_traffic(replicas, stages, tensor):
    """Return bytes between the ranks of a job of three kinds of parallelism."""
    ranks = list(itertools.product(range(replicas), range(stages), range(tensor)))
    traffic = np.zeros((len(ranks), len(ranks)))
    for i, (replica, stage, lane) in enumerate(ranks):
        for j, (other_replica, other_stage, other_lane) in enumerate(ranks):
            if (replica, stage) == (other_replica, other_stage) and lane != other_lane:
                traffic[i, j] = 100e6
            elif (replica, lane) == (other_replica, other_lane) and abs(stage - other_stage) == 1:
                traffic[i, j] = 10e6
            elif (stage, lane) == (other_stage, other_lane) and replica != other_replica:
                traffic[i, j] = 1e6
    return traffic


@pytest.mark.parametrize(
    ("per_node", "shape"),
    [
        ((4, 4), (2, 2, 2)),
        ((2, 2, 2, 2), (2, 2, 2)),
        ((4, 2, 2), (1, 4, 2)),
        ((3, 3, 2), (2, 4, 1)),
        ((5, 3), (1, 2, 4)),
        ((2, 2, 1, 1), (1, 2, 3)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_trainings_are_mapped_at_least_cost(per_node, shape, seed):
    distance = cluster_distance(per_node)
    order = np.random.default_rng(seed).permutation(len(distance))
    traffic = training_traffic(*shape)[np.ix_(order, order)]
    mapping = map_ranks(traffic, distance)
    assert sorted(mapping) == list(range(len(distance)))
    assert mapping_cost(traffic, distance, mapping) == pytest.approx(
        least_cost(traffic, distance), rel=1e-9
    )


@settings(max_examples=examples(60))
@given(ranks=st.integers(2, 7), spare=st.integers(0, 1), seed=st.integers(0, 2**32))
def test_any_traffic_is_mapped_within_a_tenth_of_the_least_cost(ranks, spare, seed):
    rng = np.random.default_rng(seed)
    traffic = rng.random((ranks, ranks)) * (rng.random((ranks, ranks)) < 0.5)
    np.fill_diagonal(traffic, 0)
    distance = rng.random((ranks + spare, ranks + spare))
    distance += distance.T
    np.fill_diagonal(distance, 0)
    mapping = map_ranks(traffic, distance)
    assert len(set(mapping)) == ranks
    least = least_cost(traffic, distance)
    assert mapping_cost(traffic, distance, mapping) <= 1.1 * least + 1e-12
    assert mapping_cost(traffic, distance, mapping) >= least - 1e-12


def test_ranks_are_named_by_node_and_device():
    cluster = Cluster(nodes=Cluster.of_text("2x8").nodes, levels=LEVELS)
    placed = [NodeDevices(node=name, devices=(2, 5)) for name in ("n0", "n1")]
    traffic = np.zeros((4, 4))
    traffic[0, 3] = traffic[1, 2] = 1.0  # rank 0 talks to 3, and 1 to 2
    places = rank_devices(cluster, placed, traffic)
    assert sorted(places) == [("n0", 2), ("n0", 5), ("n1", 2), ("n1", 5)]
    assert places[0][0] == places[3][0] != places[1][0] == places[2][0]


def test_ranks_stay_in_order_where_every_mapping_is_as_good():
    assert map_ranks(np.ones((6, 6)), np.ones((6, 6))) == tuple(range(6))


def test_a_placement_is_in_the_order_of_the_ranks_of_a_mesh():
    """Six devices of a node hold one group of four; the two left belong with those elsewhere."""
    cluster = Cluster(nodes=Cluster.of_text("2x6").nodes, levels=LEVELS)
    state = State(cluster, RateModel({}))
    state.inventory.take(((0, 0b001001), (1, 0b111000)))  # 4 and 3 are free
    state.inventory.give_back(((1, 0b001000),))
    parts = state.inventory.find("gpu", 8)
    for mesh in ((2, 4), (4, 2), (2, 2, 2)):
        job = Job(name="a", devices=8, mesh=mesh)
        placement = state.placement(job, parts)
        places = [(part.node, device) for part in placement.parts for device in part.devices]
        assert sorted(places) == sorted(
            (part.node, device)
            for part in state.inventory.devices(parts)
            for device in part.devices
        )
        assert state.inventory.parts(placement.parts) == parts
        traffic = mesh_traffic(mesh)
        one_each = [NodeDevices(node=node, devices=(device,)) for node, device in places]
        cost = mapping_cost(traffic, distances(cluster, one_each), range(8))
        assert cost == pytest.approx(least_cost(traffic, distances(cluster, one_each)))


def test_ranks_along_the_last_axis_exchange_the_most():
    traffic = mesh_traffic((2, 3))
    assert traffic[0].tolist() == [0, 10, 10, 1, 0, 0]
    assert (traffic == traffic.T).all()


def test_a_mesh_has_a_rank_for_each_device_of_a_rigid_job():
    assert Job(name="a", devices=6, mesh=(2, 3)).mesh == (2, 3)
    for fields in ({"devices": 4}, {"devices": 6, "max_devices": 8}, {"devices": 0, "mesh": (0,)}):
        with pytest.raises(ConfigError):
            Job(**{"name": "a", "mesh": (2, 3), **fields})


def test_distances_are_those_of_the_levels():
    distance = cluster_distance((1, 1, 2))
    near, leaf, spine = (
        level.latency_s / 1e6 + 1 / level.bandwidth_bytes_per_s for level in LEVELS
    )
    assert distance[2, 3] == pytest.approx(near)
    assert distance[0, 1] == pytest.approx(leaf)
    assert distance[0, 2] == distance[1, 3] == pytest.approx(spine)
    assert not distance.diagonal().any()


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(UsageError, match="3 ranks cannot be mapped to 2 devices"):
        map_ranks(np.ones((3, 3)), np.ones((2, 2)))
