"""When compression pays: on a slow link between hosts, and not where ranks share memory."""

import dataclasses

import pytest
from support.machines import collective, sheet, small_machine

from paceline.core.errors import ConfigError, UsageError
from paceline.core.machine import Link
from paceline.training.compression import CompressionEstimate, DensitySchedule, estimate

COUNT = 11_000_000


def machine(level, rate, latency_s=1e-5, collectives=()):
    own = small_machine()
    device = dataclasses.replace(own.devices[0], bandwidth_bytes_per_s=sheet(1e10))
    link = Link(level=level, latency_s=sheet(latency_s), bandwidth_bytes_per_s=sheet(rate))
    return dataclasses.replace(own, devices=(device,), links=(link,), collectives=collectives)


def test_it_pays_over_a_gigabit_and_stays_off_in_shared_memory():
    between = estimate(machine("network", 1.25e8), COUNT, hosts=2)
    assert between.pays
    # A ring: each of two hosts sends the 44 MB once.
    assert between.dense_s == pytest.approx(44e6 / 1.25e8, rel=0.01)
    assert between.sparse_s == pytest.approx(6 * 11_000 / 1.25e8, rel=0.1)
    inside = estimate(machine("shared-memory", 5e9), COUNT, hosts=1, ranks=2)
    assert not inside.pays
    assert "does not pay: selecting 22.0 ms" in str(inside)


def test_what_backward_hides_counts_against_compression():
    slow = machine("network", 1e9)
    assert estimate(slow, COUNT, hosts=2).pays
    hidden = estimate(slow, COUNT, hosts=2, hidden_s=0.03)
    assert not hidden.pays
    assert "of which backward hides 30.0 ms" in str(hidden)
    assert estimate(slow, COUNT, hosts=2, hidden_s=9.0).dense_exposed_s == 0.0


def test_a_measured_all_reduce_is_preferred_to_a_ring_on_the_link():
    cost = collective("all_reduce", latency_s=0.5, hosts=2)
    found = estimate(machine("network", 1e12, collectives=(cost,)), COUNT, hosts=2)
    assert found.dense_s > 0.5
    assert found.pays


def test_the_sparse_exchange_does_not_grow_with_the_hosts():
    times = [
        estimate(machine("network", 1.25e8, latency_s=0.0), COUNT, hosts=hosts).sparse_s
        for hosts in (4, 8, 32)
    ]
    assert max(times) < 1.4 * min(times)


def test_a_machine_that_says_too_little_is_refused():
    with pytest.raises(UsageError, match="one rank sends nothing"):
        estimate(machine("network", 1e9), COUNT, hosts=1)
    with pytest.raises(UsageError, match="without links"):
        estimate(dataclasses.replace(machine("network", 1e9), links=()), COUNT, hosts=2)


def test_the_decision_is_the_comparison_of_both_sides():
    even = CompressionEstimate(select_s=1.0, sparse_s=1.0, dense_s=2.0)
    assert not even.pays
    assert dataclasses.replace(even, dense_s=2.1).pays


def test_the_published_warmup():
    schedule = DensitySchedule(density=0.001, stages=4, steps_per_stage=100)
    published = [0.25, 0.0625, 0.015625, 0.004, 0.001]
    found = [schedule.at(100 * stage) for stage in range(5)]
    assert found == pytest.approx(published, rel=0.02)
    assert schedule.at(99) == schedule.at(0)
    assert DensitySchedule(density=0.01, steps_per_stage=0).at(0) == 0.01
    assert DensitySchedule().warmup_steps == 1000
    for wrong in ({"density": 0.0}, {"density": 1.5}, {"stages": -1}):
        with pytest.raises(ConfigError):
            DensitySchedule(**wrong)
