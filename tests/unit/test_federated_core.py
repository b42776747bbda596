"""Profiles, selection, memory of updates, splits and the classifier of simulated federations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.errors import ConfigError, UsageError
from paceline.federated.clients import Profiler, Timing, jain
from paceline.federated.config import FederationConfig
from paceline.federated.groups import class_mixes, poorest, thirds_by_speed
from paceline.federated.monitor import Evaluation, Monitor
from paceline.federated.selection import ClientsView, Goals, GoalSelector, OortSelector
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.splits import dirichlet_split
from paceline.federated.simulate.world import DeviceOptions, SimulatedClients
from paceline.federated.strategies import STRATEGIES, make_strategy
from paceline.federated.update_memory import UpdateMemory
from paceline.federated.updates import ModelUpdate, check_update, norm_limit


def view_of(clients=40, **changes):
    values = {
        "is_free": np.ones(clients, bool),
        "expected_s": np.full(clients, 10.0),
        "is_measured": np.ones(clients, bool),
        "selected": np.full(clients, 5),
        "returned": np.full(clients, 5),
        "spent_s": np.full(clients, 50.0),
        "loss": np.ones(clients),
        "samples": np.full(clients, 100),
        "surprise": np.ones(clients),
        "answers": np.ones(clients),
        "last_round": np.zeros(clients, int),
        "round": 10,
        "accuracy": (),
    }
    return ClientsView(**{**values, **changes})


# --- profiles --------------------------------------------------------------------------------


def test_measurements_outweigh_a_claim():
    profiler = Profiler(2)
    profiler.claim(0, 1e-3, 1e-6)  # ten times as fast as it is
    for _ in range(3):
        profiler.observe(0, Timing(samples=100, compute_s=1.0, bytes=1000, transfer_s=0.01))
    assert profiler.expected_s(100, 1000)[0] == pytest.approx(1.01, rel=0.1)
    profiler.claim(0, 1e-6, 1e-9)  # too late: it is measured
    assert profiler.expected_s(100, 1000)[0] == pytest.approx(1.01, rel=0.1)
    assert profiler.is_measured().tolist() == [True, False]


def test_a_client_without_a_claim_is_taken_for_a_typical_one():
    profiler = Profiler(3)
    profiler.claim(0, 1e-2, 1e-6)
    profiler.claim(1, 4e-2, 4e-6)
    expected = profiler.expected_s(100, 0)
    assert expected.tolist() == pytest.approx([1.0, 4.0, 2.0])  # the geometric mean


def test_a_profile_follows_a_device_that_becomes_slower():
    profiler = Profiler(1)
    for seconds in [1.0] * 20 + [3.0] * 6:
        profiler.observe(0, Timing(samples=1, compute_s=seconds, bytes=1, transfer_s=1e-9))
    assert profiler.expected_s(1, 0)[0] > 2.0
    again = Profiler(1)
    again.load_state_dict(profiler.state_dict())
    assert again.expected_s(1, 0)[0] == profiler.expected_s(1, 0)[0]


def test_jains_index():
    assert jain([3, 3, 3]) == 1
    assert jain([1, 0, 0, 0]) == 0.25
    assert jain([0, 0]) == 1


# --- selection -------------------------------------------------------------------------------


def share_of(selector, view, wanted, draws=400):
    hits = sum(np.isin(selector.choose(view, 4), wanted).sum() for _ in range(draws))
    return hits / (4 * draws)


@pytest.mark.parametrize(
    ("goal", "field", "values"),
    [
        ("fast", "expected_s", (2.0, 20.0)),
        ("resource_fair", "spent_s", (10.0, 500.0)),
        ("accuracy_fair", "loss", (4.0, 0.5)),
        ("quality", "surprise", (4.0, 0.5)),
    ],
)
def test_each_goal_moves_its_own_clients(goal, field, values):
    half = np.arange(40) < 20
    view = view_of(**{field: np.where(half, *values)})
    none = {"fast": 0, "resource_fair": 0, "accuracy_fair": 0, "quality": 0, "floor": 0}
    shares = [
        share_of(
            GoalSelector(Goals(**{**none, goal: weight}), np.random.default_rng(1)),
            view,
            np.flatnonzero(half),
        )
        for weight in (0, 1)
    ]
    assert shares[0] == pytest.approx(0.5, abs=0.06)
    assert shares[1] > 0.7


def test_the_floor_comes_before_all_goals():
    asked = np.full(40, 10)
    asked[[3, 7]] = 1
    expected = np.full(40, 1.0)
    expected[[3, 7]] = 100.0
    selector = GoalSelector(Goals(fast=5, floor=0.4), np.random.default_rng(0))
    chosen = selector.choose(view_of(selected=asked, expected_s=expected), 4)
    assert {3, 7} <= set(chosen.tolist())


def test_clients_above_the_ceiling_come_last():
    asked = np.full(40, 10)
    asked[:4] = 40
    expected = np.full(40, 100.0)
    expected[:4] = 1.0
    selector = GoalSelector(Goals(fast=5, ceiling=3.0), np.random.default_rng(0))
    view = view_of(selected=asked, expected_s=expected)
    assert not np.isin(selector.choose(view, 36), range(4)).any()
    assert selector.choose(view, 40).size == 40


def test_selectors_choose_free_clients_once():
    free = np.zeros(40, bool)
    free[[1, 2, 5]] = True
    for name in STRATEGIES:
        selector = make_strategy(name, 10).make_selector(np.random.default_rng(0))
        for view in (view_of(is_free=free), view_of(is_free=free, loss=np.full(40, np.nan))):
            chosen = selector.choose(view, 10).tolist()
            assert len(set(chosen)) == len(chosen)
            assert set(chosen) <= {1, 2, 5}, name


def test_a_selector_goes_on_where_its_state_was_taken():
    for name in STRATEGIES:
        one = make_strategy(name, 10).make_selector(np.random.Generator(np.random.Philox(1)))
        one.choose(view_of(), 5)
        other = make_strategy(name, 10).make_selector(np.random.Generator(np.random.Philox(2)))
        other.load_state_dict(one.state_dict())
        assert one.choose(view_of(), 5).tolist() == other.choose(view_of(), 5).tolist(), name


def test_goals_follow_the_trend_of_the_accuracy():
    goals = Goals(fast=1, quality=1, accuracy_fair=1)
    assert goals.adapted((0.1, 0.2)) == goals  # too short
    rising = goals.adapted(tuple(np.linspace(0.1, 0.6, 8)))
    flat = goals.adapted((0.8,) * 8)
    assert rising.fast > goals.fast
    assert rising.quality == goals.quality
    assert flat.fast == goals.fast
    assert flat.quality > goals.quality
    assert flat.accuracy_fair > goals.accuracy_fair


def test_oort_prefers_large_losses_and_fast_clients():
    loss = np.where(np.arange(40) < 10, 5.0, 0.5)
    selector = OortSelector(np.random.default_rng(0))
    assert share_of(selector, view_of(loss=loss), np.arange(10)) > 0.9
    slow = np.where(np.arange(40) < 5, 100.0, 1.0)
    view = view_of(loss=loss, expected_s=slow)
    few = 15  # draws: then it accepts slower ones, since utility does not grow
    assert share_of(OortSelector(np.random.default_rng(0)), view, np.arange(5), few) < 0.1


def test_impossible_goals_and_names_are_refused():
    with pytest.raises(UsageError, match="goal fast has the weight -1"):
        Goals(fast=-1)
    with pytest.raises(UsageError, match="Did you mean 'oort'"):
        make_strategy("ort", 10)


# --- memory of updates -----------------------------------------------------------------------


def test_the_memory_is_the_mean_of_all_clients_once_all_have_answered():
    rng = np.random.default_rng(0)
    deltas = rng.standard_normal((6, 5)).astype(np.float32)
    sizes = np.array([1.0, 2, 3, 4, 5, 6])
    memory = UpdateMemory(sizes, 5)
    for client in range(6):
        memory.combine([client], [deltas[client]], [1.0])
    expected = np.average(deltas, axis=0, weights=sizes)
    for answering in (
        [0],
        [2, 3],
        [5, 1, 4],
    ):  # any answers: updates stay as they were
        change = memory.combine(answering, [deltas[c] for c in answering], [1.0] * len(answering))
        assert change == pytest.approx(expected, abs=1e-6)
    assert memory.distance(0, deltas[0]) == 0
    again = UpdateMemory(sizes, 5)
    again.load_state_dict(memory.state_dict())
    assert again.combine([0], [deltas[1]], [1.0]) == pytest.approx(
        memory.combine([0], [deltas[1]], [1.0])
    )


def test_the_memory_is_unbiased_under_uniform_answers():
    rng = np.random.default_rng(1)
    deltas = rng.standard_normal((8, 3)).astype(np.float32)
    later = [UpdateMemory(np.ones(8), 3) for _ in range(8)]
    for memory in later:
        memory.combine(range(8), deltas * 0.5, [1.0] * 8)
    changes = [later[c].combine([c], [deltas[c]], [1.0]) for c in range(8)]
    assert np.mean(changes, axis=0) == pytest.approx(deltas.mean(0), abs=1e-6)


def test_a_client_weighs_in_the_memory_as_it_did_when_it_answered_last():
    rng = np.random.default_rng(2)
    deltas = rng.standard_normal((3, 4)).astype(np.float32)
    memory = UpdateMemory(np.array([1.0, 2.0, 3.0]), 4)
    memory.combine([0, 1, 2], deltas, [1.0] * 3, [4.0, 1.0, 1.0])
    memory.combine([0], [2 * deltas[0]], [1.0], [0.5])
    expected = np.average([2 * deltas[0], deltas[1], deltas[2]], axis=0, weights=[0.5, 2, 3])
    assert memory.combine([1], [deltas[1]], [1.0]) == pytest.approx(expected, abs=1e-6)


def test_a_client_that_answers_first_counts_as_itself():
    memory = UpdateMemory(np.ones(4), 2)
    first = memory.combine([0, 1], [np.float32([1, 0]), np.float32([3, 2])], [1.0, 1.0])
    assert first.tolist() == [2, 1]
    assert memory.combine([2], [np.float32([5, 5])], [1.0]).tolist() == [5, 5]


def test_updates_that_cannot_be_used_are_refused():
    def update(delta):
        return ModelUpdate(client="7", version=3, delta=delta, samples=1, steps=1, loss=0.1)

    check_update(update(np.zeros(4, np.float32)), 4)
    with pytest.raises(UsageError, match=r"client 7.*float64 of shape \(4,\)"):
        check_update(update(np.zeros(4)), 4)
    with pytest.raises(UsageError, match=r"client 7.*parameter 2 changes by nan"):
        check_update(update(np.array([0, 0, np.nan, np.inf], np.float32)), 4)


def test_a_norm_is_judged_by_those_of_other_clients():
    assert norm_limit([1.0]) == math.inf  # one other client is no scale
    assert norm_limit([1.0, 3.0]) == 200
    assert norm_limit([0.0, 0.0, 5.0]) == math.inf


def test_accuracy_for_clients_follows_from_their_classes():
    labels = np.array([0, 0, 0, 1, 1, 2])
    parts = [np.array([0, 1]), np.array([2, 3]), np.array([3, 4, 5])]
    assert class_mixes(labels, [np.array([5])], 3).tolist() == [[0, 0, 1]]
    mixes = class_mixes(labels, parts, 3)
    assert mixes.tolist() == [
        [1, 0, 0],
        [0.5, 0.5, 0],
        [0, pytest.approx(2 / 3), pytest.approx(1 / 3)],
    ]
    groups = thirds_by_speed(mixes, np.array([30.0, 10.0, 20.0]))
    assert {name: mix.tolist() for name, mix in groups.items()} == {
        "fast": mixes[1].tolist(),
        "middle": mixes[2].tolist(),
        "slow": mixes[0].tolist(),
    }
    assert poorest(mixes, np.array([0.1, 0.9, 0.9])) == pytest.approx(0.18)  # between 0.1 and 0.5


# --- the simulated world ---------------------------------------------------------------------


def test_a_split_gives_each_client_few_classes():
    labels = np.repeat(np.arange(10), 600)
    even = dirichlet_split(labels, 20, 100.0, np.random.default_rng(0))
    uneven = dirichlet_split(labels, 20, 0.1, np.random.default_rng(0), most=400)
    assert np.mean([np.unique(labels[part]).size for part in even]) == 10
    assert np.mean([np.unique(labels[part]).size for part in uneven]) < 7
    assert sum(part.size for part in even) == labels.size
    assert np.unique(np.concatenate(even)).size == labels.size
    assert max(part.size for part in uneven) == 400
    assert min(part.size for part in uneven) >= 20


def test_clients_come_and_go():
    world = SimulatedClients.make(200, DeviceOptions(), np.random.default_rng(0))
    shares = [world.online(hour * 3600.0).mean() for hour in range(24)]
    assert 0.3 < np.mean(shares) < 0.7
    assert world.next_change_s() > 23 * 3600.0
    always = SimulatedClients.make(5, DeviceOptions(online=False), np.random.default_rng(0))
    assert always.online(0.0).all()
    assert always.next_change_s() == math.inf


def test_silos_wait_in_queues_and_never_leave():
    options = DeviceOptions(kind="silos", queue_s=300.0, queue_spread=1.0)
    world = SimulatedClients.make(64, options, np.random.default_rng(0))
    assert world.online(0.0).all()
    assert world.next_change_s() == math.inf
    assert 150 < np.median(world.queue_s) < 600
    assert world.queue_s.max() > 5 * world.queue_s.min()
    profiler = Profiler(64)
    for client in range(64):
        for _ in range(8):
            timing, seconds = world.timing(client, 100, 1000)
            assert seconds > timing.waiting_s > 0
            profiler.observe(client, timing)
    expected = profiler.expected_s(100, 2000)
    assert np.corrcoef(np.log(expected), np.log(world.queue_s))[0, 1] > 0.9
    again = Profiler(64)
    again.load_state_dict(profiler.state_dict())
    assert (again.expected_s(100, 2000) == expected).all()


def test_profiles_follow_devices_on_which_other_work_runs():
    options = DeviceOptions(online=False, busy_share=0.4, busy_factor=4.0)
    world = SimulatedClients.make(20, options, np.random.default_rng(0))
    profiler, claims, misses = Profiler(20), [], []
    for client in range(20):
        profiler.claim(client, world.sample_s[client], world.down_s[client])
    times = np.arange(0, 6 * 3600.0, 30.0)
    busy = np.mean([[world.is_busy(client, at_s) for at_s in times] for client in range(20)])
    assert 0.3 < busy < 0.5
    for at_s in times:
        for client in range(20):
            timing, _ = world.timing(client, 100, 1000, at_s)
            expected_s = profiler.expected_s(100, 0)[client]
            misses.append(abs(np.log(expected_s / timing.compute_s)))
            claims.append(abs(np.log(world.sample_s[client] * 100 / timing.compute_s)))
            profiler.observe(client, timing)
    assert np.mean(misses) < 0.6 * np.mean(claims)


def test_impossible_devices_are_refused():
    for options, message in (
        ({"kind": "silo"}, "kind 'silo'"),
        ({"drop_share": 1.5}, "drop_share 1.5"),
        ({"sample_ms": 0.0}, "sample_ms = 0.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            DeviceOptions(**options)


def test_the_slowest_devices_go_to_the_given_clients():
    world = SimulatedClients.make(
        50, DeviceOptions(), np.random.default_rng(0), [100.0, 200.0, 400.0]
    )
    share = np.arange(50) / 50
    world.order_by(share)
    assert (np.diff(world.sample_s) >= 0).all()
    assert (np.diff(world.down_s) >= 0).all()


def test_the_classifiers_gradient_is_that_of_its_loss():
    classifier = Classifier(inputs=6, hidden=5, classes=3)
    rng = np.random.default_rng(0)
    vector = classifier.initial(rng).astype(np.float64)
    inputs, labels = rng.standard_normal((4, 6)), np.array([0, 2, 1, 1])

    def loss(parameters):
        rows = classifier.probabilities(parameters, inputs)[np.arange(4), labels]
        return -np.log(rows + 1e-9).mean()

    after, _ = classifier.train(
        vector, inputs, labels, batch=4, steps=1, learning_rate=1e-3, rng=rng
    )
    step = 1e-6
    for place in range(0, classifier.parameters, 7):
        shifted = [vector.copy(), vector.copy()]
        shifted[0][place] += step
        shifted[1][place] -= step
        slope = (loss(shifted[0]) - loss(shifted[1])) / (2 * step)
        assert (vector - after)[place] / 1e-3 == pytest.approx(slope, abs=1e-4)


def test_alarms():
    monitor = Monitor()
    for number in range(10):
        assert not monitor.add(Evaluation(number, number, 0.1 * number, (0.1, 0.2)))
    assert monitor.seconds_to(0.5) == 6  # the mean of 0.4, 0.5 and 0.6
    assert monitor.seconds_to(0.99) is None
    alarms = [monitor.add(Evaluation(n, n, 0.5, (0.5,))) for n in range(10, 14)]
    assert alarms[-1].kind == "divergence"
    assert "accuracy fell from 0.800 to 0.500" in alarms[-1].text
    flat = Monitor()
    alarms = [flat.add(Evaluation(n, n, 0.8, (0.8,))) for n in range(30)]
    assert alarms[-1].kind == "plateau"
    assert not alarms[10]


# --- the file --------------------------------------------------------------------------------


def test_a_federations_file(tmp_path):
    path = tmp_path / "federation.toml"
    devices = "[devices]\nkind = 'silos'\nqueue_s = 60.0\n"
    path.write_text(f"clients = 30\n[goals]\nfast = 2.0\n{devices}")
    config = FederationConfig.from_toml(path)
    assert (config.clients, config.goals.fast, config.devices.queue_s) == (30, 2.0, 60.0)
    assert (config.data.folder, config.scores) == ("", "")
    path.write_text("scores = 'scores.json'\n[data]\nfolder = 'images'\n")
    config = FederationConfig.from_toml(path)  # paths begin at the file's folder
    assert (config.data.folder, config.scores) == (
        str(tmp_path / "images"),
        str(tmp_path / "scores.json"),
    )
    for text, message in (
        ("cliens = 3", "clients"),
        ("clients = 5", "cohort of 10 of 5"),
        ("clients = ", "TOML"),
        ("[data]\nalpha = 0.0", r"data.alpha = 0.0"),
        ("[goals]\nfast = 20.0", "weight 20.0"),
        ("[faults]\ngiant = [100]", r"faults.giant names client 100"),
    ):
        path.write_text(text)
        with pytest.raises((ConfigError, UsageError), match=message):
            FederationConfig.from_toml(path)
