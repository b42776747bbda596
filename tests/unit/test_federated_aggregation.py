"""Aggregation: each rule against a plain reference in float64, and its limits."""

import math
import sys
import tracemalloc

import numpy as np
import pytest

from paceline.core.errors import Missing, UsageError
from paceline.federated import aggregation
from paceline.federated.aggregation import (
    GaussianMechanism,
    MaskedSum,
    SecureGroup,
    ServerAdam,
    ServerSgd,
    ServerYogi,
    chunks,
)
from paceline.federated.updates import ModelUpdate, check_updates

PARAMETERS = 301


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last of them shorter, in vectors that are quick to make."""
    monkeypatch.setattr(chunks, "CHUNK_VALUES", 700)


def vectors(count, *, parameters=PARAMETERS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 2, parameters).astype(np.float32) for _ in range(count)]


def doubles(deltas):
    return np.array(deltas, dtype=np.float64)


def update(client, delta, **changes):
    values = {"version": 0, "samples": 10, "steps": 5, "loss": 1.0} | changes
    return ModelUpdate(client=client, delta=np.asarray(delta, np.float32), **values)


# --- weights ---------------------------------------------------------------------------------


def test_a_weighted_sum_is_that_of_float64():
    deltas, weights = vectors(9), np.linspace(0.1, 2, 9)
    expected = weights @ doubles(deltas)
    assert np.allclose(aggregation.weighted_sum(deltas, weights), expected, rtol=1e-6, atol=1e-6)


def test_a_sum_keeps_what_float32_would_lose():
    deltas = [np.full(3, value, np.float32) for value in (1e8, 1.0, -1e8)]
    assert aggregation.weighted_sum(deltas, [1, 1, 1]).tolist() == [1, 1, 1]


def test_fedavg_weighs_by_samples():
    deltas = vectors(3)
    mean = aggregation.weighted_sum(deltas, aggregation.sample_shares([1, 2, 5]))
    expected = np.average(doubles(deltas), axis=0, weights=[1, 2, 5])
    assert np.allclose(mean, expected, rtol=1e-6, atol=1e-6)


def test_fednova_corrects_the_bias_towards_clients_with_more_steps():
    # Quadratics (x - c)^2 / 2 have the mean of c as optimum; client i does t_i steps at rate r.
    centres, steps, rate = np.array([0.0, 10.0]), [1, 20], 0.01
    models = {"average": 5.0, "nova": 5.0}
    for _ in range(4000):
        for name, model in models.items():
            deltas = []
            for centre, count in zip(centres, steps, strict=True):
                local = model
                for _ in range(count):
                    local -= rate * (local - centre)
                deltas.append(np.array([local - model], np.float32))
            shares = aggregation.equal_shares(2)
            weights = aggregation.nova_weights(shares, steps) if name == "nova" else shares
            models[name] += float(aggregation.weighted_sum(deltas, weights)[0])
    assert abs(models["average"] - 5) > 3
    assert abs(models["nova"] - 5) < 0.6


def test_fednova_with_equal_steps_is_fedavg():
    assert aggregation.nova_weights([0.2, 0.8], [7, 7]) == pytest.approx([0.2, 0.8])


def test_late_updates_count_less():
    weights = aggregation.staleness_weights([0, 3, 8], power=0.5)
    assert weights == pytest.approx([1, 1 / 2, 1 / 3])
    assert aggregation.staleness_weights([0, 9], power=0) == pytest.approx([1, 1])


# --- robust rules ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_the_median_is_that_of_float64(count):
    deltas = vectors(count)
    expected = np.median(doubles(deltas), axis=0)
    assert np.allclose(aggregation.coordinate_median(deltas), expected, rtol=1e-6)


@pytest.mark.parametrize(("count", "trim"), [(5, 0), (5, 2), (10, 3)])
def test_the_trimmed_mean_is_that_of_float64(count, trim):
    deltas = vectors(count)
    expected = np.sort(doubles(deltas), axis=0)[trim : count - trim].mean(axis=0)
    found = aggregation.trimmed_mean(deltas, trim)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)


def reference_krum_scores(deltas, attackers):
    rows = doubles(deltas)
    scores = []
    for index, row in enumerate(rows):
        squares = sorted(
            float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != index
        )
        scores.append(sum(squares[: len(rows) - attackers - 2]))
    return np.array(scores)


def test_krum_chooses_what_the_definition_chooses():
    for seed in range(20):
        deltas = vectors(9, seed=seed)
        scores = reference_krum_scores(deltas, 3)
        assert aggregation.krum(deltas, 3) == scores.argmin()
        best = np.argsort(scores)[:4]
        expected = doubles(deltas)[best].mean(axis=0)
        found = aggregation.multi_krum(deltas, 3, 4)
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_krum_sees_small_differences_beside_a_large_common_part():
    common = np.full(PARAMETERS, 1e4, np.float32)
    deltas = [common + part / 100 for part in vectors(7)]
    distances = aggregation.robust.squared_distances(deltas)
    expected = ((doubles(deltas)[:, None] - doubles(deltas)[None]) ** 2).sum(axis=2)
    assert np.allclose(distances, expected, rtol=1e-9)


@pytest.mark.parametrize("rule", ["median", "trimmed mean", "krum", "multi-krum"])
def test_a_minority_cannot_steer_a_robust_rule(rule):
    honest = [np.float32(1) + part / 10 for part in vectors(8)]
    deltas = [*honest, *(np.full(PARAMETERS, -1e6, np.float32) for _ in range(2))]
    result = {
        "median": lambda: aggregation.coordinate_median(deltas),
        "trimmed mean": lambda: aggregation.trimmed_mean(deltas, 2),
        "krum": lambda: deltas[aggregation.krum(deltas, 2)],
        "multi-krum": lambda: aggregation.multi_krum(deltas, 2, 5),
    }[rule]()
    assert np.abs(result - 1).max() < 1
    assert aggregation.weighted_sum(deltas, [0.1] * 10).max() < -1e5


def test_rules_refuse_what_they_promise_nothing_for():
    with pytest.raises(UsageError, match="2 f \\+ 3"):
        aggregation.krum(vectors(6), 2)
    with pytest.raises(UsageError, match="cannot be trimmed"):
        aggregation.trimmed_mean(vectors(4), 2)
    with pytest.raises(UsageError, match="no update"):
        aggregation.coordinate_median([])
    with pytest.raises(UsageError, match="one length"):
        aggregation.weighted_sum([np.zeros(2, np.float32), np.zeros(3, np.float32)], [1, 1])
    with pytest.raises(UsageError, match="finite weights"):
        aggregation.weighted_sum(vectors(2), [1, math.nan])


@pytest.mark.parametrize("rule", ["sum", "median", "trimmed mean", "multi-krum", "private mean"])
def test_no_rule_holds_more_than_a_part_of_the_round(rule, monkeypatch):
    monkeypatch.undo()  # chunks as they are
    parameters = 100_000
    base = vectors(1, parameters=parameters)[0]
    deltas = [np.roll(base, shift) for shift in range(60)]
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1.0, expected_clients=60)
    rules = {
        "sum": lambda: aggregation.weighted_sum(deltas, [1 / 60] * 60),
        "median": lambda: aggregation.coordinate_median(deltas),
        "trimmed mean": lambda: aggregation.trimmed_mean(deltas, 5),
        "multi-krum": lambda: aggregation.multi_krum(deltas, 5, 40),
        "private mean": lambda: mechanism.mean(deltas, np.random.default_rng(0)),
    }
    tracemalloc.start()
    try:
        rules[rule]()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    round_bytes = 60 * parameters * 4
    assert peak < round_bytes / 4


# --- clipping --------------------------------------------------------------------------------


def test_clipping_shortens_long_vectors_and_copies_no_others():
    delta = vectors(1)[0]
    length = np.linalg.norm(doubles(delta))
    clipped = aggregation.clip(delta, length / 3)
    assert np.allclose(clipped, doubles(delta) / 3, rtol=1e-6)
    assert aggregation.clip(delta, length * 1.01) is delta


# --- server optimizers -----------------------------------------------------------------------


def reference_steps(kind, model, changes, *, rate, beta1=0.9, beta2=0.99, tau=1e-3, momentum=0.0):
    model = model.astype(np.float64)
    mean, square = np.zeros_like(model), np.full_like(model, tau**2)
    for change in doubles(changes):
        if kind is ServerSgd:
            mean = momentum * mean + change
            model = model + rate * mean
            continue
        mean = beta1 * mean + (1 - beta1) * change
        if kind is ServerAdam:
            square = beta2 * square + (1 - beta2) * change**2
        else:
            square = square - (1 - beta2) * change**2 * np.sign(square - change**2)
        model = model + rate * mean / (np.sqrt(square) + tau)
    return model


CASES = [
    (ServerSgd, {"rate": 1.0}),
    (ServerSgd, {"rate": 0.5, "momentum": 0.9}),
    (ServerAdam, {"rate": 0.02, "tau": 0.01}),
    (ServerYogi, {"rate": 0.02, "tau": 0.01}),
]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_server_optimizers_are_those_of_float64(kind, settings):
    changes = [part / 10 for part in vectors(12, seed=1)]
    model = start = vectors(1)[0]
    optimizer = kind(PARAMETERS, **settings)
    for change in changes:
        before = change.copy()
        model = optimizer.step(model, change)
        assert (change == before).all()
    expected = reference_steps(kind, start, changes, **settings)
    assert model.dtype == np.float32
    assert np.allclose(model, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_a_server_optimizer_continues_from_its_state(kind, settings):
    changes, model = vectors(6), vectors(1, seed=9)[0]
    whole, first, second = (kind(PARAMETERS, **settings) for _ in range(3))
    expected = found = model
    for change in changes:
        expected = whole.step(expected, change)
    for change in changes[:3]:
        found = first.step(found, change)
    second.load_state_dict(first.state_dict())
    first.step(found, changes[0])  # the state is a copy
    for change in changes[3:]:
        found = second.step(found, change)
    assert (found == expected).all()
    other = ServerYogi if kind is ServerAdam else ServerAdam
    with pytest.raises(UsageError, match="not the state"):
        other(PARAMETERS).load_state_dict(first.state_dict())


# --- differential privacy --------------------------------------------------------------------


def test_the_private_mean_is_clipped_and_divided_by_the_expected_number():
    mechanism = GaussianMechanism(clip_norm=1.0, noise_multiplier=1e-9, expected_clients=4)
    deltas = [*vectors(3), np.zeros(PARAMETERS, np.float32)]
    clipped = [row / max(1, np.linalg.norm(row)) for row in doubles(deltas)]
    found = mechanism.mean(deltas, np.random.default_rng(0))
    assert np.allclose(found, sum(clipped) / 4, atol=1e-7)


def test_the_noise_has_the_stated_deviation():
    mechanism = GaussianMechanism(clip_norm=2.0, noise_multiplier=3.0, expected_clients=5)
    deltas = [np.zeros(40_000, np.float32)] * 3
    noise = mechanism.mean(deltas, np.random.default_rng(0))
    assert noise.std() == pytest.approx(2 * 3 / 5, rel=0.02)
    assert abs(noise.mean()) < 0.03


def test_one_client_cannot_change_the_sum_by_more_than_the_bound():
    mechanism = GaussianMechanism(clip_norm=0.5, noise_multiplier=1.0, expected_clients=1)
    deltas = vectors(4)
    with_all = mechanism.mean(deltas, np.random.default_rng(3))
    without = mechanism.mean(deltas[:3], np.random.default_rng(3))
    assert np.linalg.norm(doubles(with_all) - without) <= 0.5 + 1e-4


def test_epsilon_of_one_plain_round_lies_above_the_exact_one_and_near_it():
    pytest.importorskip("dp_accounting", reason="needs paceline[privacy]")
    found = aggregation.epsilon(
        noise_multiplier=2.0, sampling_probability=1.0, rounds=1, delta=1e-5
    )
    exact = exact_gaussian_epsilon(2.0, 1e-5)
    assert exact <= found <= 1.25 * exact


def exact_gaussian_epsilon(noise, delta):
    """Return epsilon by bisection of the exact trade-off (Balle and Wang, ICML 2018, theorem 8)."""

    def phi(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    low, high = 0.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        reached = phi(1 / (2 * noise) - middle * noise) - math.exp(middle) * phi(
            -1 / (2 * noise) - middle * noise
        )
        low, high = (middle, high) if reached > delta else (low, middle)
    return high


def test_epsilon_grows_with_rounds_and_falls_with_noise_and_sampling():
    pytest.importorskip("dp_accounting", reason="needs paceline[privacy]")

    def at(noise=1.0, probability=0.01, rounds=100):
        return aggregation.epsilon(
            noise_multiplier=noise, sampling_probability=probability, rounds=rounds, delta=1e-5
        )

    assert at(rounds=0) == 0
    assert at(rounds=10) < at() < at(rounds=1000)
    assert at(noise=2.0) < at() < at(probability=0.1)


def test_epsilon_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(Missing, match=r"paceline\[privacy\]"):
        aggregation.epsilon(noise_multiplier=1.0, sampling_probability=0.1, rounds=1, delta=1e-5)


# --- secure aggregation ----------------------------------------------------------------------

MEMBERS = ("ana", "bo", "cy", "dee", "eve", "fay")


def seeds_of(member):
    return {
        other: "-".join(sorted((member, other))).encode().ljust(16, b".")
        for other in MEMBERS
        if other != member
    }


def secure_round(lost=(), number=1):
    group = SecureGroup(members=MEMBERS, round=number, parameters=PARAMETERS, bound=100.0)
    deltas = dict(zip(MEMBERS, vectors(len(MEMBERS)), strict=True))
    total = MaskedSum(group)
    for member in MEMBERS:
        if member not in lost:
            total.add(member, group.mask(member, deltas[member], seeds_of(member)))
    return group, deltas, total


def test_masks_cancel_and_the_mean_is_that_of_float64():
    group, deltas, total = secure_round()
    expected = doubles(list(deltas.values())).mean(axis=0)
    assert np.abs(total.mean() - expected).max() <= group.step
    assert total.shares(1.2) == pytest.approx(dict.fromkeys(MEMBERS, 0.2))


def test_a_masked_update_is_uniform_and_new_in_each_round():
    zeros = np.zeros(20_000, np.float32)
    first, second = (
        SecureGroup(members=MEMBERS, round=number, parameters=zeros.size, bound=1.0).mask(
            "bo", zeros, seeds_of("bo")
        )
        for number in (1, 2)
    )
    counts, _ = np.histogram(first, bins=16, range=(0, 2**32))
    assert np.abs(counts - zeros.size / 16).max() < 6 * math.sqrt(zeros.size / 16)
    assert (first == second).mean() < 0.001


def test_the_masks_of_a_member_that_drops_out_are_removed():
    group, deltas, total = secure_round(lost=("cy",))
    total.give_up("cy")
    with pytest.raises(UsageError, match="seeds to disclose"):
        total.mean()
    for member in MEMBERS:
        if member != "cy":
            total.disclose(member, "cy", seeds_of(member)["cy"])
    expected = doubles([delta for member, delta in deltas.items() if member != "cy"]).mean(axis=0)
    assert np.abs(total.mean() - expected).max() <= group.step


def test_the_server_cannot_unmask_a_member_by_calling_it_lost():
    group, deltas, total = secure_round()
    with pytest.raises(UsageError, match="cannot be given up"):
        total.give_up("bo")
    with pytest.raises(UsageError, match="must not be disclosed"):
        total.disclose("ana", "bo", seeds_of("ana")["bo"])
    _, _, total = secure_round(lost=("cy",))
    total.give_up("cy")
    with pytest.raises(UsageError, match="given up, before"):
        total.add("cy", group.mask("cy", deltas["cy"], seeds_of("cy")))


def test_a_group_of_too_few_is_not_opened():
    with pytest.raises(UsageError, match="5 or more"):
        SecureGroup(members=MEMBERS[:4], round=1, parameters=3, bound=1.0)
    _, _, total = secure_round(lost=("cy", "dee"))
    for gone in ("cy", "dee"):
        total.give_up(gone)
        for member in set(MEMBERS) - {"cy", "dee"}:
            total.disclose(member, gone, seeds_of(member)[gone])
    with pytest.raises(UsageError, match="5 members must have answered"):
        total.mean()


# --- checks before aggregation ---------------------------------------------------------------


def test_broken_updates_are_refused_and_named_and_the_others_go_on(caplog):
    good = [update(f"good-{index}", delta) for index, delta in enumerate(vectors(3))]
    bad = [
        update("nan", np.where(np.arange(PARAMETERS) == 7, np.nan, 1)),
        update("infinite", np.full(PARAMETERS, np.inf)),
        update("short", np.ones(PARAMETERS - 1)),
        update("giant", np.full(PARAMETERS, 1e30)),
        update("good-1", np.ones(PARAMETERS)),
    ]
    accepted, refusals = check_updates([*bad[:4], *good, bad[4]], PARAMETERS)
    assert [found.client for found in accepted] == ["good-0", "good-1", "good-2"]
    assert {refusal.client: refusal.check for refusal in refusals} == {
        "nan": "values",
        "infinite": "values",
        "short": "values",
        "giant": "norm",
        "good-1": "once",
    }
    assert "parameter 7 changes by nan" in caplog.text
    assert "update of client giant refused (norm)" in caplog.text


def test_giants_do_not_hide_each_other_nor_make_others_giants():
    small = [update(f"small-{index}", delta) for index, delta in enumerate(vectors(5))]
    giants = [update(f"giant-{index}", np.full(PARAMETERS, 1e6)) for index in range(2)]
    accepted, refusals = check_updates([*small, *giants], PARAMETERS)
    assert len(accepted) == 5
    assert {refusal.client for refusal in refusals} == {"giant-0", "giant-1"}
