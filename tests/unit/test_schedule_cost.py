"""Predicted times of schedules: the textbooks' formulas, shared links, and traffic by level."""

import dataclasses
import doctest
import importlib
import math
from typing import get_args

import numpy as np
import pytest
from support.machines import sheet
from support.schedule_cases import interleaved, schedules

from paceline.core.errors import ConfigError, UsageError
from paceline.core.machine import CollectiveCost, CollectivePoint, Device, Link, Machine
from paceline.perf.communication import all_reduce_s, broadcast_s
from paceline.schedules import (
    Schedule,
    Topology,
    best_chunks,
    binomial,
    candidates,
    chain,
    chain_binomial,
    chain_chain,
    check,
    fastest,
    groups_of,
    halving_doubling,
    level_volumes,
    recursive_doubling,
    ring,
    schedule_s,
    torus,
    two_level_leader,
    two_level_sharded,
)
from paceline.schedules.choice import squarest_rows
from paceline.schedules.schedule import Operation

A, B, GAMMA = 10e-6, 1e-9, 0.2e-9  # seconds a message, a byte, a reduced byte
SIZES = np.array([0.0, 1000.0, 1e6, 1e9])


def link(level="network", sharing="pair", latency_s=A, per_byte_s=B):
    return Link(
        level=level,
        latency_s=sheet(latency_s),
        bandwidth_bytes_per_s=sheet(1 / per_byte_s),
        sharing=sharing,
    )


def flat(ranks, sharing="pair", gamma=GAMMA):
    """Return every rank on a host of its own."""
    hosts = tuple((rank,) for rank in range(ranks))
    return Topology(hosts=hosts, across=link(sharing=sharing), reduction_s_per_byte=gamma)


def two_levels(hosts, sharing="node"):
    return Topology(
        hosts=hosts,
        inside=link("shared-memory", "pair", A / 10, B / 10),
        across=link(sharing=sharing),
    )


@pytest.mark.parametrize("ranks", [2, 3, 8, 17])
def test_the_ring_takes_what_the_formula_says(ranks):
    share = (ranks - 1) / ranks
    steps = ranks - 1
    half = steps * A + share * SIZES * B
    wanted = {"reduce_scatter": half + share * SIZES * GAMMA, "all_gather": half}
    wanted["all_reduce"] = wanted["reduce_scatter"] + half
    for operation, seconds in wanted.items():
        assert schedule_s(ring(operation, ranks), flat(ranks), SIZES) == pytest.approx(seconds)


def test_halving_takes_log_p_steps_and_the_bytes_of_the_ring():
    log = 3
    seconds = 2 * log * A + 2 * 7 / 8 * SIZES * B + 7 / 8 * SIZES * GAMMA
    predicted = schedule_s(halving_doubling("all_reduce", 8), flat(8), SIZES)
    assert predicted == pytest.approx(seconds)
    doubling = schedule_s(recursive_doubling(8), flat(8), SIZES)
    assert doubling == pytest.approx(log * (A + SIZES * (B + GAMMA)))


@pytest.mark.parametrize("ranks", [2, 5, 8, 16])
def test_trees_take_what_the_formulas_say(ranks):
    rounds = math.ceil(math.log2(ranks))
    reduced = schedule_s(binomial("reduce", ranks), flat(ranks), SIZES)
    assert reduced == pytest.approx(rounds * (A + SIZES * (B + GAMMA)))
    sent = schedule_s(binomial("broadcast", ranks), flat(ranks), SIZES)
    assert sent == pytest.approx(rounds * (A + SIZES * B))
    chained = schedule_s(chain("broadcast", ranks, chunks=10), flat(ranks), SIZES)
    assert chained == pytest.approx((ranks - 2 + 10) * (A + SIZES / 10 * B))


def test_the_sharded_all_reduce_is_at_the_bound_of_the_link_between_hosts():
    hosts = groups_of(8, 4)
    (sharded,) = schedule_s(two_level_sharded(hosts), two_levels(hosts), [1e9])
    bound_s = 2 * (2 - 1) / 2 * 1e9 * B
    inside_s = 2 * 3 / 4 * 1e9 * B / 10
    assert sharded == pytest.approx(bound_s + inside_s, rel=1e-3)


@pytest.mark.parametrize(
    ("sharing", "factor"), [("pair", 1), ("device", 2), ("node", 4), ("all", 8)]
)
def test_messages_share_what_the_link_says(sharing, factor):
    """Four ranks with two devices on each of two hosts; each sends to its counterpart."""
    hosts = groups_of(8, 4)
    topology = dataclasses.replace(two_levels(hosts, sharing), devices=2)
    part = two_level_sharded(hosts).transfers
    exchange = tuple(t._replace(step=0) for t in part if t.step == 3)
    schedule = dataclasses.replace(two_level_sharded(hosts), transfers=exchange)
    (seconds,) = schedule_s(schedule, topology, [8e6])
    assert seconds == pytest.approx(A + factor * 1e6 * B)


def test_incast_shares_the_receiver():
    """Three hosts that send to one at once take three times as long, and three latencies."""
    schedule = Schedule(
        operation="reduce",
        algorithm="flat",
        ranks=4,
        chunks=1,
        root=0,
        transfers=tuple(
            chain("reduce", 2, chunks=1).transfers[0]._replace(source=r) for r in (1, 2, 3)
        ),
    )
    (seconds,) = schedule_s(schedule, flat(4, "node", 0.0), [1e6])
    assert seconds == pytest.approx(3 * (A + 1e6 * B))


def test_a_longer_message_never_takes_less_time():
    for schedule in schedules(6):
        predicted = schedule_s(schedule, flat(6, "node"), np.geomspace(1, 1e9, 40))
        assert (np.diff(predicted) >= 0).all(), schedule.algorithm


def test_the_volumes_of_a_level_are_those_of_the_algorithms():
    hosts = groups_of(8, 4)
    messages, volume = level_volumes(two_level_sharded(hosts), hosts)["across"]
    assert (messages, volume) == (16, pytest.approx(2.0))  # n bytes each way
    assert level_volumes(two_level_leader(hosts), hosts)["across"] == (4, pytest.approx(2.0))
    messages, volume = level_volumes(ring("all_reduce", 8), hosts)["across"]
    assert (messages, volume) == (28, pytest.approx(28 / 8))
    assert level_volumes(torus(hosts), hosts)["inside"][1] > 0


@pytest.mark.parametrize(
    ("schedule", "steps", "sent"),
    [
        (ring("all_reduce", 6), 10, 2 * 5 / 6),
        (ring("all_gather", 6), 5, 5 / 6),
        (halving_doubling("all_reduce", 8), 6, 2 * 7 / 8),
        (halving_doubling("reduce_scatter", 8), 3, 7 / 8),
        (halving_doubling("all_reduce", 6), 6, 2 * 3 / 4 + 1),
        (halving_doubling("reduce_scatter", 6), 4, 1),
        (recursive_doubling(8), 3, 3),
        (recursive_doubling(6), 4, 3),
        (binomial("reduce", 6), 3, 1),
        (binomial("broadcast", 6), 3, 3),
        (chain("reduce", 6, chunks=10), 6 - 2 + 10, 1),
        (chain_binomial("reduce", groups_of(12, 3), chunks=10), 3 - 2 + 2 + 10, 1),
        (chain_chain("reduce", groups_of(12, 3), chunks=10), 3 - 2 + 4 - 1 + 10, 1),
        (two_level_sharded(groups_of(12, 3)), 2 * 2 + 2 * 3, 2 * 2 / 3 + 2 * 3 / 12),
        (two_level_leader(groups_of(12, 3)), 2 * 2 + 2 * 3, 2 + 2 * 3 / 4),
        (torus(groups_of(12, 3)), 2 * 2 + 2 * 3, 2 * 5 / 12 + 4 * 3 / 12),
    ],
    ids=lambda value: f"{value.algorithm}-{value.ranks}" if isinstance(value, Schedule) else "",
)
def test_steps_and_bytes_are_those_of_the_guide(schedule, steps, sent):
    """Bytes as a multiple of the message, of the rank that sends most."""
    assert schedule.steps == steps
    chunks = np.zeros(schedule.ranks)
    for transfer in schedule.transfers:
        chunks[transfer.source] += transfer.end - transfer.begin
    assert chunks.max() / schedule.chunks == pytest.approx(sent)


def test_chains_win_for_long_messages_and_trees_for_short_ones():
    """S-Caffe's crossovers: binomial, then chain-binomial, then chain-chain as messages grow."""
    ranks, sizes = 160, np.geomspace(64, 1 << 28, 23)
    topology = Topology(
        hosts=groups_of(ranks, 8),
        inside=link("shared-memory", "node", 2e-6, 1e-10),
        across=link(latency_s=5e-6, sharing="node"),
        reduction_s_per_byte=GAMMA,
    )
    groups = groups_of(ranks, 8)
    times = {"binomial": schedule_s(binomial("reduce", ranks), topology, sizes)}
    for name, make in (("chain-binomial", chain_binomial), ("chain-chain", chain_chain)):
        options = [make("reduce", groups, chunks=chunks) for chunks in (1, 4, 16, 64, 256)]
        times[name] = np.min([schedule_s(s, topology, sizes) for s in options], axis=0)
    best = [min(times, key=lambda name: times[name][i]) for i in range(len(sizes))]
    assert best[0] == "binomial"
    assert best[-1] == "chain-chain"
    order = ["binomial", "chain-binomial", "chain-chain"]
    assert [order.index(name) for name in best] == sorted(order.index(name) for name in best)


def test_the_best_number_of_chunks_is_near_the_best_of_all():
    for size in (1e4, 1e6, 1e8):
        chunks = best_chunks(15, size, link())
        options = [*range(1, 65), 128, 256, 512, 1024, chunks]
        times = {
            c: schedule_s(chain("broadcast", 16, chunks=c), flat(16), [size])[0]
            for c in set(options)
        }
        assert times[chunks] <= 1.02 * min(times.values())
    assert best_chunks(1, 1e9, link()) == 1
    assert best_chunks(10, 0, link()) == 1


def test_a_topology_of_a_machine_takes_its_links_and_memory():
    device = Device(
        name="cpu",
        kind="cpu",
        cores=8,
        memory_bytes=sheet(1e9),
        bandwidth_bytes_per_s=sheet(30e9),
        bandwidth_shared_bytes_per_s=sheet(15e9),
    )
    links = (link("shared-memory"), link("loopback"), link("network"))
    machine = Machine(name="m", devices=(device,), links=links)
    topology = Topology.of(machine, [[0, 1], [2]])
    assert topology.inside == links[0]
    assert topology.across == links[2]
    assert topology.reduction_s_per_byte == pytest.approx(3 / 15e9)
    alone = Topology.of(machine, [[0], [1]])
    assert alone.inside is None
    assert alone.reduction_s_per_byte == pytest.approx(3 / 30e9)
    one_host = Topology.of(machine, [[0, 1]], inside="loopback")
    assert (one_host.inside, one_host.across) == (links[1], None)
    with pytest.raises(UsageError, match="'infiniband'") as caught:
        Topology.of(machine, [[0], [1]], across="infiniband")
    assert "shared-memory, loopback, network" in caught.value.why


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="4 ranks, the hosts have 3"):
        schedule_s(ring("all_reduce", 4), flat(3), [1])
    for hosts in ([[0, 1], [1]], [[0, 2]], [[0], []], []):
        with pytest.raises(UsageError, match="each rank from 0 on once"):
            two_level_leader(hosts)
    for make in (two_level_sharded, torus):
        with pytest.raises(UsageError, match="got 1 to 2") as caught:
            make([[0, 1], [2]])
        assert "two_level_leader" in caught.value.fix
    with pytest.raises(ConfigError, match="root 3 is not among 3 ranks"):
        binomial("reduce", 3, root=3)
    with pytest.raises(UsageError, match="root 9 is not among 3 ranks"):
        chain_binomial("reduce", groups_of(3, 2), root=9, chunks=1)
    with pytest.raises(ConfigError, match="at least 1 rank and 1 chunk"):
        chain("reduce", 3, chunks=0)
    with pytest.raises(UsageError, match="groups of 0"):
        groups_of(3, 0)
    with pytest.raises(ConfigError, match="root is None"):
        Schedule(operation="reduce", algorithm="x", ranks=1, chunks=1)
    with pytest.raises(ConfigError, match="3 chunks cannot be divided among 2"):
        Schedule(operation="all_gather", algorithm="x", ranks=2, chunks=3)
    with pytest.raises(ConfigError, match="unknown operation"):
        Schedule(operation="all_reduec", algorithm="x", ranks=2, chunks=3)


def test_perf_extends_a_measured_curve_as_the_replay_does():
    """The formulas of `perf.communication` for more ranks are those of the ring and of the tree."""

    def measured(schedule):
        points = zip(SIZES, schedule_s(schedule, flat(schedule.ranks), SIZES), strict=True)
        return CollectiveCost(
            backend="any",
            operation=schedule.operation,
            ranks=schedule.ranks,
            level="network",
            points=tuple(CollectivePoint(bytes=n, seconds=sheet(s)) for n, s in points),
        )

    for ranks in (2, 8, 64):
        (ring_s,) = schedule_s(ring("all_reduce", ranks), flat(ranks), [3e7])
        assert sum(all_reduce_s(measured(ring("all_reduce", 4)), 3e7, ranks)) == pytest.approx(
            ring_s
        )
        (tree_s,) = schedule_s(binomial("broadcast", ranks), flat(ranks), [3e7])
        assert broadcast_s(measured(binomial("broadcast", 4)), 3e7, ranks) == pytest.approx(tree_s)


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("hosts", [groups_of(8, 4), ((0, 1, 2), (3, 4)), groups_of(4, 4)])
def test_the_fastest_is_no_slower_than_any_candidate(operation, hosts):
    topology = two_levels(hosts)
    chosen = fastest(operation, topology, SIZES)
    found = candidates(operation, hosts)
    for i, size in enumerate(SIZES):
        times = [schedule_s(schedule, topology, [size])[0] for schedule in found]
        assert schedule_s(chosen[i], topology, [size])[0] == min(times)
    for schedule in found:
        check(schedule)
        assert schedule.operation == operation
    assert len({(schedule.algorithm, schedule.chunks) for schedule in found}) == len(found)


def test_the_choice_goes_from_few_messages_to_few_bytes():
    first, *_, last = fastest("all_reduce", two_levels(groups_of(16, 4)), SIZES)
    assert first.steps < last.steps
    assert last.algorithm.startswith("two-level-sharded")


@pytest.mark.parametrize("operation", get_args(Operation))
@pytest.mark.parametrize("hosts", [groups_of(12, 4), groups_of(13, 4), groups_of(24, 2), ((0,),)])
def test_a_limit_leaves_out_what_has_more_transfers_and_keeps_the_smallest(operation, hosts):
    every = [(s.algorithm, s.chunks) for s in candidates(operation, hosts)]
    smallest = candidates(operation, hosts, most_transfers=0)
    assert smallest
    for most in (200, 1000, 10**9):
        found = candidates(operation, hosts, most_transfers=most)
        assert {(s.algorithm, s.chunks) for s in smallest + found} <= set(every)
        assert max(len(s.transfers) for s in found) <= most
    assert [(s.algorithm, s.chunks) for s in found] == every


def test_a_torus_may_have_rows_of_several_hosts():
    hosts = groups_of(64, 2)
    rows = squarest_rows(hosts)
    assert [len(row) for row in rows] == [8] * 8
    assert [rank for row in rows for rank in row] == list(range(64))
    found = {s.algorithm for s in candidates("all_reduce", hosts)}
    assert {"torus-32x2", "torus-8x8"} <= found
    for size in (1, 3, 7):
        prime = groups_of(7 * size, size)
        assert squarest_rows(prime) in (prime, (tuple(range(7 * size)),))
    check(next(s for s in candidates("all_reduce", hosts) if s.algorithm == "torus-8x8"))


def test_one_rank_takes_no_time():
    for schedule in schedules(1):
        assert schedule_s(schedule, flat(1), [0, 1e9]).tolist() == [0, 0]


def test_interleaved_hosts_cost_a_flat_ring_more():
    """Every message of a ring in the order of the ranks then crosses hosts."""
    sizes = [1e8]
    hosts = interleaved(8, 4)
    near = schedule_s(ring("all_reduce", 8), two_levels(groups_of(8, 4)), sizes)
    far = schedule_s(ring("all_reduce", 8), two_levels(hosts), sizes)
    sharded = schedule_s(two_level_sharded(hosts), two_levels(hosts), sizes)
    assert far > 3 * near > near > sharded


@pytest.mark.parametrize("name", ["compose", "groups", "check", "halving"])
def test_examples_hold(name):
    result = doctest.testmod(importlib.import_module(f"paceline.schedules.{name}"))
    assert result.attempted
    assert not result.failed
