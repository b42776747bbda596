"""Measured memory and availability of clients, how they drift, and what selection makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.federated.availability import AvailabilityProfile
from paceline.federated.client_memory import MemoryProfile
from paceline.federated.clients import Profiler
from paceline.federated.config import FederationConfig
from paceline.federated.rounds import CancelClient, RoundController, RoundOptions, StartClient
from paceline.federated.selection import Goals, GoalSelector
from paceline.federated.simulate.engine import ClientWork
from paceline.federated.simulate.world import DeviceOptions
from paceline.federated.study import read_data, simulate

MIB = 2**20


def test_silences_lower_availability_and_answers_raise_it():
    profile = AvailabilityProfile(3)
    assert profile.answers(0.0).tolist() == [1, 1, 1]
    for now_s in range(80, 480, 80):
        profile.observe(now_s, 0, answered=False, allowed_s=80.0)
        profile.observe(now_s, 1, answered=True, allowed_s=80.0)
    profile.observe(480.0, 1, answered=False, allowed_s=80.0)
    silent, present, unknown = profile.answers(480.0)
    assert silent < 0.25
    assert 0.8 < present < unknown == 1


def test_a_client_that_was_silent_long_ago_is_tried_again():
    profile = AvailabilityProfile(2)
    for now_s in range(8):
        profile.observe(now_s, 0, answered=False, allowed_s=80.0)
        profile.observe(now_s, 1, answered=False, allowed_s=3600.0)  # a job of a facility
    values = [profile.answers(now_s)[0] for now_s in (8.0, 3600.0, 5 * 3600.0)]
    assert values == sorted(values)
    assert values[0] < 0.2 < 0.7 < values[-1]
    assert profile.answers(5 * 3600.0)[1] < 0.3
    again = AvailabilityProfile(2)
    again.load_state_dict(profile.state_dict())
    assert (again.answers(100.0) == profile.answers(100.0)).all()


def test_claims_of_memory_are_compared_with_the_peaks_that_others_report():
    memory = MemoryProfile(5)
    memory.claim(0, 100 * MIB)
    memory.claim(4, 100 * MIB)
    assert memory.fits(0.0).all()  # what training takes is not known
    for client, peak in ((1, 200), (2, 220), (3, 9_000_000)):  # one of them lies
        memory.observe(client, peak * MIB)
    assert memory.needed_bytes == 220 * MIB
    assert memory.fits(0.0).tolist() == [False, True, True, True, False]
    memory.observe(0, 210 * MIB)  # a success outweighs a claim
    assert memory.fits(0.0).tolist() == [True, True, True, True, False]


def test_a_refusal_counts_for_a_while_and_longer_each_time():
    memory = MemoryProfile(1)
    memory.observe(0, 200 * MIB)
    assert memory.next_try_s(0.0) == np.inf
    memory.refused(100.0, 0)
    assert memory.next_try_s(100.0) == 400
    assert [memory.fits(t)[0] for t in (100.0, 399.0, 400.0)] == [False, False, True]
    memory.refused(400.0, 0)
    assert [memory.fits(t)[0] for t in (999.0, 1000.0)] == [False, True]
    for _ in range(20):
        memory.refused(1000.0, 0)
    assert memory.next_try_s(1000.0) == 1000 + 80 * 60
    again = MemoryProfile(1)
    again.load_state_dict(memory.state_dict())
    assert not again.fits(5000.0)[0]
    memory.observe(0, 0)  # it fits again, and its peak is not said
    assert memory.fits(1001.0)[0]


def controller_of(clients, *, cohort=4, in_flight=4):
    neutral = Goals(fast=0, resource_fair=0, quality=0, floor=0)
    selector = GoalSelector(neutral, np.random.default_rng(0))
    options = RoundOptions(cohort=cohort, in_flight=in_flight)
    return RoundController(options, selector, Profiler(clients), np.full(clients, 20), 1000)


def test_clients_that_were_silent_are_asked_less_often():
    controller = controller_of(6, cohort=1, in_flight=1)
    availability, asked = controller.profiler.availability, []
    for _ in range(10):
        availability.observe(0.0, 0, answered=False, allowed_s=1e9)
    for now_s in range(400):
        (action,) = controller.advance(float(now_s), np.ones(6, bool))
        asked.append(action.client)
        controller.lost(now_s + 0.5, action.client)  # the client says so: that is no silence
    shares = np.bincount(asked, minlength=6) / 400
    assert 0 < shares[0] < 0.06
    assert shares[1:].min() > 0.12
    assert availability.answers(400.0)[1:].tolist() == [1.0] * 5


def test_a_deadline_that_passes_is_a_silence_and_a_client_that_has_left_another_one():
    controller = controller_of(5)
    asked = [action.client for action in controller.advance(0.0, np.ones(5, bool))]
    controller.lost(1.0, asked[0], left=True)
    controller.lost(1.0, asked[1])
    controller.refused(1.0, asked[2])
    deadline_s = controller.next_deadline_s
    cancelled = controller.advance(deadline_s, np.zeros(5, bool))
    assert cancelled == [CancelClient(asked[3], deadline_s)]
    answers = controller.profiler.availability.answers(deadline_s)
    assert [answers[client] < 1 for client in asked] == [True, False, False, True]


def test_whom_the_training_does_not_fit_is_not_asked_until_a_pause_is_over():
    controller = controller_of(4)
    online = np.ones(4, bool)
    assert len(controller.advance(0.0, online)) == 4
    controller.lacked_memory(1.0, 2)
    assert controller.advance(1.0, online) == []
    again_s = controller.profiler.memory.next_try_s(1.0)
    before = controller.advance(again_s - 1, online)  # the others' deadlines have passed
    assert {action.client for action in before} == {0, 1, 3}
    assert StartClient(2, 0, again_s + 30) in controller.advance(again_s, online)
    assert controller.wasted_s >= 1.0
    assert controller.failed[2] == 0  # it said so at once, and held no place


def simulated(strategy="paceline", rounds=60, **devices):
    config = FederationConfig.small()
    options = DeviceOptions(**{"online": False, "drop_share": 0.0, **devices})
    work = ClientWork(epochs=2.0, learning_rate=0.05, memory_mib=256.0)
    config = replace(config, devices=options, work=work, rounds=rounds)
    data, scores = read_data(config)
    return simulate(config, data, scores, strategy, 0)


def lacking(result):
    return [row for row in result.unpaid if row.check == "memory"]


def test_simulated_devices_without_enough_memory_are_found_out_and_left_alone():
    result = simulated(memory_mib=300.0, memory_spread=0.7)
    rows = lacking(result)
    assert rows
    assert "MiB of memory are free, and training takes 256 MiB" in rows[0].reason
    # A claim below what others report is not tried again; at first nobody has reported.
    assert max(row.count for row in rows) <= 2
    assert all(result.returned[int(row.client)] == 0 for row in rows)
    assert result.final > 0.5


@pytest.mark.parametrize("strategy", ["paceline", "over-selected"])
def test_memory_that_suffices_changes_nothing(strategy):
    busy = {"busy_share": 0.2, "online": True, "drop_share": 0.05}
    plain = simulated(strategy, 30, **busy)
    assert simulated(strategy, 30, memory_mib=1e6, memory_spread=0.5, **busy) == plain


def test_memory_that_other_work_takes_is_tried_again():
    busy = {"busy_share": 0.5, "busy_factor": 1.0}
    result = simulated(memory_mib=400.0, memory_spread=0.0, **busy)
    clients = {int(row.client) for row in lacking(result)}
    assert len(clients) > 3
    came_back = [client for client in clients if result.returned[client] > 0]
    assert len(came_back) > 0.8 * len(clients)
    assert result.rounds == 60


def test_nobody_has_enough_memory_and_the_simulation_ends():
    result = simulated(memory_mib=10.0, memory_spread=0.0)
    assert (result.rounds, sum(result.returned)) == (0, 0)
    assert len(lacking(result)) == 20


def test_work_of_clients_that_leave_is_silent():
    stays = simulated(online=True, sample_ms=500.0)
    leaves = simulated(online=True, sample_ms=500.0, leaving_loses=True)
    assert not any(row.check == "deadline" for row in stays.unpaid)
    assert any(row.check == "deadline" for row in leaves.unpaid)
    assert leaves.rounds > 0
