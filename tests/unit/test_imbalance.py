"""Forecasts of remedies against imbalance, on made-up runs of which the truth is known."""

import dataclasses

import numpy as np
import pytest
from support.synthetic import BASE_S, Culprit, Noise, made_up_run, planted_seconds

from paceline.core.errors import ConfigError, NotFound, UsageError
from paceline.perf.imbalance import ForecastSettings, forecast_remedies
from paceline.perf.imbalance.forecast import block_steps, resampled
from paceline.perf.imbalance.maxima import SHAPES, fit_tail, slowest
from paceline.perf.imbalance.parts import BusyParts, correlation_steps, parts_of_run
from paceline.perf.imbalance.remedies import equal_shares

QUICK = ForecastSettings(draws=8)
STEPS = 300


def harmonic(count):
    return sum(1 / k for k in range(1, count + 1))


def of_run(random, ranks=2, noise=None, culprits=(), nodes=None, **known):
    phases, counters, _ = made_up_run(random, ranks, STEPS, noise or Noise(), culprits)
    known = {"loader_workers": 2, **known}
    return parts_of_run(phases, counters, nodes or ["a"] * ranks, **known)


def made_up(busy_s, **changed):
    """Return parts of steps that are all work of samples, without communication."""
    parts = BusyParts(
        busy_s=busy_s,
        sharable_s=busy_s.copy(),
        no_core_s=np.zeros_like(busy_s),
        free_s=busy_s.max(axis=0) - busy_s,
        nodes=np.arange(len(busy_s)),
        communication_s=0.0,
        step_s=float(busy_s.max(axis=0).mean()),
        loader_workers=2,
    )
    return dataclasses.replace(parts, **changed)


# --- the slowest of many ---------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 6, 48, 384])
def test_the_slowest_of_exponential_ranks_takes_a_harmonic_number(ranks):
    """The expected maximum of n exponential values of mean 1 is 1 + 1/2 + ... + 1/n."""
    values = np.random.default_rng(0).exponential(1.0, 40_000)
    assert slowest([values], [ranks]).mean_s[0] == pytest.approx(harmonic(ranks), rel=0.03)


def test_the_fitted_tail_reaches_beyond_the_measured_values():
    """Of 300 measured values the slowest of 24,576 is the largest; a tail goes on."""
    random = np.random.default_rng(1)
    found = [
        [slowest([random.exponential(1.0, 300)], [24_576], tail).mean_s[0] for _ in range(40)]
        for tail in ("measured", "pareto")
    ]
    assert np.median(found[0]) < 0.75 * harmonic(24_576)
    assert np.median(found[1]) == pytest.approx(harmonic(24_576), rel=0.25)


def test_copies_of_equal_nodes_are_one_node_copied_as_often():
    values = np.random.default_rng(2).gamma(2.0, 1.0, 500)
    twice, once = slowest([values, values], [3]), slowest([values], [6])
    assert twice.mean_s[0] == pytest.approx(once.mean_s[0])
    assert twice.p95_s[0] == pytest.approx(once.p95_s[0])


def test_a_bounded_tail_ends_and_a_heavy_one_is_limited():
    random = np.random.default_rng(3)
    bounded = fit_tail(random.uniform(0, 1, 1000))
    assert bounded is not None
    assert bounded.shape < 0
    assert bounded.quantile_s(1e-9) == pytest.approx(1.0, abs=0.1)
    heavy = fit_tail(random.pareto(1.1, 1000))
    assert heavy is not None
    assert heavy.shape == SHAPES[1]
    assert fit_tail(np.ones(1000)) is None
    assert fit_tail(random.uniform(0, 1, 50)) is None


# --- remedies --------------------------------------------------------------------------------


def test_rebalancing_takes_a_persistent_slow_rank_away():
    """Of ranks that take 1 and 1.5 alike long: 2 / (1/1 + 1/1.5) = 1.2 in place of 1.5."""
    busy_s = np.repeat([[1.0], [1.5]], 100, axis=1)
    found = forecast_remedies(made_up(busy_s), [24_576], QUICK)
    for world in found.worlds:
        assert world.gain_of("none").step_s == pytest.approx(1.5)
        assert world.gain_of("rebalancing").step_s == pytest.approx(1.2, rel=1e-6)
        assert world.gain_of("rebalancing").gain == pytest.approx(0.2, rel=1e-6)
        assert world.gain_of("budget").gain == 0.0


def test_rebalancing_stops_at_its_bounds_and_moves_only_work_of_samples():
    shares, ready_s = equal_shares(np.array([[1.0], [9.0]]), np.zeros((2, 1)), 0.25, 3.0)
    np.testing.assert_allclose(shares[:, 0], [1.75, 0.25], rtol=1e-6)
    assert ready_s[0] == pytest.approx(2.25)
    shares, ready_s = equal_shares(np.ones((2, 1)), np.array([[0.0], [0.4]]), 0.25, 3.0)
    np.testing.assert_allclose(shares[:, 0], [1.2, 0.8], rtol=1e-6)
    assert ready_s[0] == pytest.approx(1.2)


def test_rebalancing_leaves_noise_alone():
    """Equal ranks: what medians of a window differ by is not worth a change."""
    found = forecast_remedies(of_run(np.random.default_rng(4)), [6, 384], QUICK)
    for world in found.worlds:
        assert abs(world.gain_of("rebalancing").gain) < 0.01


def test_a_budget_brings_back_what_had_no_core():
    random = np.random.default_rng(5)
    starved = 2 * BASE_S * (random.random((2, STEPS)) < 0.2)
    culprits = [Culprit(i, "not_running", starved[i]) for i in range(2)]
    found = forecast_remedies(of_run(random, culprits=culprits), [384], QUICK)
    two, many = found.worlds
    assert many.gain_of("none").step_s > 3 * BASE_S  # some rank of 384 is always without a core
    assert many.gain_of("budget").step_s < 1.4 * BASE_S
    assert many.gain_of("budget").gain > two.gain_of("budget").gain
    assert many.gain_of("together").gain == pytest.approx(many.gain_of("budget").gain, abs=0.03)


def test_pacing_needs_time_to_refill_in():
    busy_s = np.full((2, 100), 1.0)
    parts = made_up(busy_s, no_core_s=np.full((2, 100), 0.4), free_s=np.full((2, 100), 0.1))
    found = forecast_remedies(parts, [6], QUICK).worlds[0]
    assert found.gain_of("budget").gain == pytest.approx(0.4)
    assert found.gain_of("pacing").gain == pytest.approx(0.1)


def test_no_remedy_brings_more_than_the_cores_have_to_do():
    busy_s = np.full((2, 100), 1.0)
    parts = made_up(busy_s, no_core_s=np.full((2, 100), 0.4), cores=2, cpu_s=1.8)
    found = forecast_remedies(parts, [6], QUICK).worlds
    assert found[0].gain_of("budget").step_s == pytest.approx(0.9)
    noisy = dataclasses.replace(
        parts, busy_s=busy_s * np.random.default_rng(0).uniform(0.8, 1.2, busy_s.shape)
    )
    found = forecast_remedies(noisy, [384], QUICK).worlds
    assert 0.9 <= found[0].gain_of("budget").step_s < 1.05
    assert found[1].gain_of("budget").step_s > 1.1  # noise stays, around what cores have to do


def test_cpu_time_above_that_of_the_measured_steps_makes_no_step_longer():
    """Loader workers that start, or threads that spin, take CPU time that steps do not need."""
    busy_s = np.random.default_rng(7).uniform(0.8, 1.2, (2, 100))
    parts = made_up(busy_s, no_core_s=0.4 * busy_s, cores=2, cpu_s=5.0)
    for gain in forecast_remedies(parts, [6], QUICK).worlds[0].gains:
        assert gain.gain > -0.005  # noise is another one


def test_threads_that_spin_now_and_then_are_not_work_of_the_cores():
    phases, counters, _ = made_up_run(np.random.default_rng(8), 2, STEPS, Noise(), ())
    calm = parts_of_run(phases, counters, ["a"] * 2, cores=2)
    spins = np.where(np.arange(STEPS) % 3 == 0, 10.0, 1.0)
    spun = [dataclasses.replace(rank, running_s=rank.running_s * spins) for rank in phases]
    spinning = parts_of_run(spun, counters, ["a"] * 2, cores=2)
    assert 0 < spinning.cpu_s < 1.5 * calm.cpu_s


def test_remedies_that_cannot_be_judged_are_named_with_the_reason():
    random = np.random.default_rng(6)
    without = forecast_remedies(of_run(random, ranks=1, loader_workers=0), [6], QUICK)
    assert set(without.not_judged) == {"pacing", "rebalancing"}
    assert [gain.remedy for gain in without.worlds[0].gains] == ["none", "budget", "together"]
    unknown = dataclasses.replace(of_run(random), no_core_s=None)
    assert set(forecast_remedies(unknown, [6], QUICK).not_judged) == {"budget", "pacing"}


# --- replay ----------------------------------------------------------------------------------


def test_the_replay_at_the_measured_ranks_is_what_was_measured():
    found = forecast_remedies(of_run(np.random.default_rng(7), ranks=4), None, QUICK)
    assert found.worlds[0].ranks == 4
    assert found.worlds[0].gain_of("none").step_s == pytest.approx(found.step_s, rel=1e-9)
    assert abs(found.held_out_error) < 0.02
    assert abs(found.independent_error) < 0.01  # in a made-up run ranks are independent


def test_runs_of_more_ranks_take_what_was_forecast_from_two():
    """Runs of 2 ranks forecast the step of 8 independent ones, which are then made up."""
    noise = Noise(level=0.1)
    measured_s = np.mean(
        [of_run(np.random.default_rng(seed), ranks=8, noise=noise).step_s for seed in range(4)]
    )
    inside = []
    for seed in range(6):
        found = forecast_remedies(
            of_run(np.random.default_rng(100 + seed), noise=noise), [8], QUICK
        )
        step = found.worlds[1].gain_of("none")
        assert step.step_s == pytest.approx(measured_s, rel=0.03)
        inside.append(step.low_s <= measured_s <= step.high_s)
    assert sum(inside) >= 3  # of bands from 8 draws


def test_two_nodes_forecast_their_own_run():
    random = np.random.default_rng(8)
    late = [Culprit(3, "compute", np.full(STEPS, BASE_S / 2))]
    parts = of_run(random, ranks=4, culprits=late, nodes=["a", "a", "b", "b"])
    found = forecast_remedies(parts, [400], QUICK)
    assert found.nodes == 2
    assert abs(found.replay_error) < 0.01
    assert found.worlds[1].gain_of("rebalancing").gain > 0.15
    assert not any("One node" in sentence for sentence in found.cautions)


def test_what_ranks_do_every_tenth_step_they_do_at_once():
    """Logging in every tenth step makes one long step of ten, however many ranks log."""
    random = np.random.default_rng(9)
    seconds = planted_seconds(random, "periodic", 0.5, STEPS, period=10)
    logging = [Culprit(i, "blocked", seconds) for i in range(2)]
    found = forecast_remedies(of_run(random, culprits=logging), [24_576], QUICK)
    assert found.period == 10
    assert found.worlds[-1].gain_of("none").step_s < 1.5 * found.step_s


def test_blocks_are_longer_than_noise_lasts_and_keep_the_place_in_the_period():
    random = np.random.default_rng(10)
    bursts = np.repeat(random.random(60), 5)
    assert 3 <= correlation_steps(bursts) <= 12
    assert correlation_steps(random.random(300)) <= 2
    parts = made_up(np.tile(np.arange(6.0), (2, 20)), period=6)
    block = block_steps(parts)
    assert block % 6 == 0
    again = resampled(parts, block, random)
    np.testing.assert_array_equal(again.busy_s[0] % 6, np.arange(parts.steps) % 6)


def test_a_forecast_is_the_same_for_the_same_seed():
    parts = of_run(np.random.default_rng(11))
    assert forecast_remedies(parts, [6], QUICK) == forecast_remedies(parts, [6], QUICK)


def test_what_was_not_measured_is_said_and_bad_requests_are_refused():
    parts = of_run(np.random.default_rng(12))
    words = " ".join(forecast_remedies(parts, [24_576], QUICK).cautions)
    assert "One node was measured" in words
    assert "slowest measured step" in words
    assert "CPU time of loader workers" in words
    with pytest.raises(UsageError, match="1 ranks from a run of 2"):
        forecast_remedies(parts, [1], QUICK)
    with pytest.raises(ConfigError, match="most_share"):
        ForecastSettings(most_share=0.5)
    phases, counters, _ = made_up_run(np.random.default_rng(0), 2, 20, Noise())
    with pytest.raises(NotFound, match="14 steps"):
        parts_of_run(phases, counters, ["a", "a"])
