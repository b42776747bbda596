"""Blame on made-up runs: the right rank, cause and shape in most, and hardly ever one in noise."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic import BASE_S, Culprit, Noise, made_up_run, planted_seconds, stragglers

from paceline.core.breakdown import PHASES
from paceline.trace.analysis.blame import find_stragglers
from paceline.trace.analysis.causes import CAUSES, main_cause
from paceline.trace.analysis.host import HostTime
from paceline.trace.analysis.p_values import binomial_tail, sum_tail, upper_tail
from paceline.trace.analysis.patterns import find_pattern
from paceline.trace.analysis.shapes import PatternRules, best_range
from paceline.trace.analysis.shifts import find_shifts
from paceline.trace.format.events import PYTHON_CODE

SHAPES = ("persistent", "window", "periodic", "drifting", "intermittent", "recurring")
RULES = PatternRules(late_threshold_s=0.0005, min_late_steps=0.65, max_p_value=0.01, series=4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_culprit_is_found_with_its_cause_and_shape(shape, cause):
    seed = [SHAPES.index(shape), CAUSES.index(cause), 77]
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 5))
    rank, period = int(random.integers(ranks)), int(random.choice([3, 5, 7, 10, 20]))
    seconds = planted_seconds(random, shape, random.uniform(0.1, 0.5), 300, period)
    noise = Noise(level=0.03, bursts=0.2)
    found = stragglers(random, ranks, 300, noise, [Culprit(rank, cause, seconds)])
    assert found
    main = found[0]
    expected = "persistent" if shape == "window" else shape
    assert (main.rank, main.cause, main.shape) == (rank, cause, expected)
    if shape == "recurring":
        first, second = np.flatnonzero(np.diff(seconds) > 0)[:2]
        assert main.period_steps == pytest.approx(second - first, abs=4)
        late = np.flatnonzero(seconds)
        assert main.block_steps == pytest.approx(len(late) / (300 / main.period_steps), rel=0.3)
    else:
        assert main.period_steps == (period if shape == "periodic" else 0)
        assert main.block_steps == 0
    assert (main.slope_ms_per_step > 0) == (shape == "drifting")
    assert main.confidence >= 0.99
    late = np.flatnonzero(seconds)
    assert main.first_step >= late[0] - 8
    assert main.last_step <= late[-1] + 8


def test_noise_accuses_hardly_anybody():
    """Of 120 runs without a culprit one may be accused; bursts beside, which starve threads."""
    accused = []
    for seed in range(120):
        random = np.random.default_rng([seed, 99])
        noise = Noise(
            level=float(random.choice([0.01, 0.03, 0.08, 0.2])),
            wander=float(random.choice([0.0, 0.01, 0.03])),
            bursts=float(random.choice([0.0, 0.1, 0.3])),
        )
        ranks, steps = int(random.choice([2, 3, 4, 8])), int(random.choice([60, 100, 300]))
        found = stragglers(random, ranks, steps, noise)
        accused += [late for late in found if late.cause != "not_running"]
    assert len(accused) <= 1


def _with_bursts(seed, ranks, steps, mean_s, culprits=()):
    """Return whom the analysis names if each rank is now and then blocked in up to 15 steps."""
    random = np.random.default_rng([seed, 5])
    bursts = []
    for rank in range(ranks):
        seconds = np.zeros(steps)
        step = int(random.exponential(40))
        while step < steps:
            length = int(random.integers(1, 16))
            seconds[step : step + length] = random.exponential(mean_s)
            step += length + int(random.exponential(40)) + 1
        bursts.append(Culprit(rank, "blocked", seconds))
    return {late.rank for late in stragglers(random, ranks, steps, culprits=[*bursts, *culprits])}


def test_a_burst_of_which_all_ranks_have_some_accuses_hardly_anybody():
    """The kernel does not explain them: all ranks wait for a disk or the network now and then."""
    accused = [_with_bursts(seed, 3, 200, 0.004) for seed in range(20)]
    accused += [_with_bursts(seed, 2, 400, 0.010) for seed in range(20)]
    assert sum(bool(ranks) for ranks in accused) <= 3


def test_a_range_amid_bursts_of_all_ranks_is_found():
    seconds = np.where(np.arange(300) // 60 == 2, 2 * BASE_S, 0.0)
    found = [_with_bursts(seed, 3, 300, 0.004, [Culprit(0, "data", seconds)]) for seed in range(10)]
    assert sum(ranks == {0} for ranks in found) >= 9


def test_two_ranks_that_are_late_in_turn_are_both_found():
    steps = np.arange(120)
    ranges = ((steps >= 10) & (steps < 40), (steps >= 55) & (steps < 100))
    culprits = [Culprit(i, "data", np.where(late, BASE_S, 0.0)) for i, late in enumerate(ranges)]
    found = stragglers(np.random.default_rng(9), 2, 120, culprits=culprits)
    assert {late.rank for late in found} == {0, 1}


@pytest.mark.parametrize("seed", range(4))
def test_a_lasting_half_with_peaks_in_it_is_a_range(seed):
    """On a quiet node single peaks fit the series better than one level does."""
    seconds = np.where(np.arange(400) < 200, 0.0, 0.004)
    seconds[7::20] += 0.05
    noise = Noise(level=0.01)
    (found, *_) = stragglers(
        np.random.default_rng(seed), 2, 400, noise, [Culprit(0, "data", seconds)]
    )
    assert (found.shape, found.first_step, found.last_step) == ("persistent", 200, 399)


def test_a_neighbour_that_keeps_to_one_rank_is_named_and_not_the_rank():
    random = np.random.default_rng(5)
    starved = planted_seconds(random, "intermittent", 0.3, 300)
    (found,) = stragglers(random, 2, 300, Noise(), [Culprit(1, "not_running", starved)])
    assert (found.rank, found.cause) == (1, "not_running")


def test_a_lasting_culprit_on_a_noisy_node_is_found():
    """Its delay varies by more than half of its size, and it is on time in a tenth of the steps."""
    random = np.random.default_rng(3)
    seconds = random.exponential(0.8 * BASE_S, 200) * (random.random(200) < 0.9)
    (found, *_) = stragglers(
        random, 2, 200, Noise(level=0.2, wander=0.03), [Culprit(0, "data", seconds)]
    )
    assert (found.rank, found.cause, found.shape) == (0, "data", "persistent")


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_without_a_rhythm_have_no_period(ranks):
    seconds = np.zeros(400)
    for first, length in ((20, 25), (75, 40), (180, 20), (215, 30), (330, 25)):
        seconds[first : first + length] = 0.008
    noise = Noise(level=0.03, bursts=0.2)
    (found, *_) = stragglers(
        np.random.default_rng(4), ranks, 400, noise, [Culprit(1, "compute", seconds)]
    )
    assert (found.rank, found.cause, found.shape) == (1, "compute", "recurring")
    assert (found.period_steps, found.block_steps) == (0, pytest.approx(25, abs=3))
    assert found.first_step == pytest.approx(20, abs=3)


def test_long_episodes_are_found_beside_as_many_short_ones_of_another_rank():
    """On a noisy node: counts of episodes say nothing, their seconds do."""
    random = np.random.default_rng(3)
    own, other = np.zeros(900), np.zeros(900)
    begins = np.cumsum(random.integers(14, 38, 60))
    for begin in begins[begins < 885]:
        own[begin : begin + 6] = 0.02
        other[begin + 10] = 0.02
    culprits = [Culprit(1, "blocked", own), Culprit(0, "blocked", other)]
    found = stragglers(random, 2, 900, Noise(level=0.2, bursts=0.2), culprits)
    assert (found[0].rank, found[0].cause, found[0].shape) == (1, "blocked", "intermittent")


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(1, 40), max_size=6),
    st.sampled_from([0.5, 0.25]),
)
def test_the_tail_of_a_sum_is_that_of_all_its_cases(own, theirs, share):
    amounts = np.array([*own, *theirs], dtype=float)
    cases = np.array(list(itertools.product([0, 1], repeat=len(amounts))))
    chances = np.prod(np.where(cases, share, 1 - share), axis=1)
    exact = float(chances[cases @ amounts >= sum(own)].sum())
    nearly = float(chances[cases @ amounts >= sum(own) - 0.01 * amounts.sum()].sum())
    found = sum_tail(np.array(own, dtype=float), np.array(theirs, dtype=float), share)
    assert exact - 1e-12 <= found <= nearly + 1e-12


@given(st.integers(1, 300), st.sampled_from([0.5, 0.25, 0.01]))
def test_the_tail_of_a_sum_of_many_is_bounded_above_and_not_by_much(own, share):
    theirs = 500 - own
    exact = binomial_tail(own, theirs, share)
    found = sum_tail(np.full(own, 0.02), np.full(theirs, 0.02), share)
    assert exact - 1e-9 <= found <= min(1.0, 40 * exact)


def test_two_ranks_whose_blocks_alternate_are_neither_of_them_late():
    """Each waits as much as it makes the other wait: uneven work, which advice is about."""
    steps = np.arange(400)
    turns = steps // 25 % 2
    culprits = [Culprit(i, "compute", np.where(turns == i, 0.004, 0.0)) for i in range(2)]
    assert stragglers(np.random.default_rng(9), 2, 400, culprits=culprits) == ()


@pytest.mark.parametrize("steps", [[61], [20, 60, 100]])
def test_a_few_steps_that_cost_much_are_told_as_what_happened(steps):
    seconds = np.zeros(120)
    seconds[steps] = 1.0 / len(steps)
    noise = Noise(level=0.05, bursts=0.2)
    culprits = [Culprit(1, "evaluation", seconds)]
    (found,) = stragglers(np.random.default_rng(2), 3, 120, noise, culprits)
    assert (found.rank, found.cause, found.shape) == (1, "evaluation", "rare")
    assert (found.first_step, found.last_step) == (steps[0], steps[-1])
    assert found.late_ms == pytest.approx(1e3 / len(steps), rel=0.1)
    assert round(found.late_share * (steps[-1] - steps[0] + 1)) == len(steps)


def test_a_few_steps_that_cost_little_are_not_told():
    seconds = np.zeros(300)
    seconds[[61, 200]] = 0.1
    assert stragglers(np.random.default_rng(2), 2, 300, culprits=[Culprit(1, "gc", seconds)]) == ()


def _with_a_line(name, share, culprit):
    """Return the main straggler of a run whose rank 1 spent a share of its delay at a line."""
    random = np.random.default_rng(11)
    phases, *rest = made_up_run(random, 2, 200, Noise(), [culprit])
    at_lines = (
        HostTime(name=name, measured_s=share * culprit.seconds.sum(), samples=9, near=True),
        HostTime(name="log.py:1", measured_s=0.4, samples=9),
    )
    hosts = (at_lines[1:], at_lines)
    placed = [dataclasses.replace(rank, host=own) for rank, own in zip(phases, hosts, strict=True)]
    return find_stragglers(placed, *rest)[0]


def test_a_delay_between_phases_has_the_line_at_which_most_of_it_is():
    seconds = np.full(200, 0.005)
    late = _with_a_line("train.py:7", 0.8, Culprit(1, "blocked", seconds))
    assert (late.cause, late.place) == ("blocked", "near train.py:7")
    assert _with_a_line("train.py:7", 0.3, Culprit(1, "blocked", seconds)).place == ""
    assert _with_a_line(PYTHON_CODE, 0.8, Culprit(1, "blocked", seconds)).place == ""
    assert _with_a_line("train.py:7", 0.8, Culprit(1, "compute", seconds)).place == ""  # forward


def test_confidence_grows_with_the_number_of_steps():
    def confidence(steps):
        random = np.random.default_rng(8)
        series = random.normal(0.001, 0.0009, 400)[:steps]
        pattern = find_pattern(
            series, -series[np.newaxis], dataclasses.replace(RULES, max_p_value=1)
        )
        return 1 - pattern.p_value if pattern else 0.0

    assert confidence(16) < confidence(64) < confidence(400)
    assert confidence(400) > 0.999


def test_a_delay_that_grows_from_amid_the_run_drifts():
    """Such a bend looks like noise with a memory, which the test of lines allows for."""
    random = np.random.default_rng(6)
    steps = np.arange(300)
    series = np.where(steps < 90, 0.0, 0.022e-3 * steps) + random.laplace(0, 0.0002, 300)
    pattern = find_pattern(series, -series[np.newaxis], RULES)
    assert (pattern.shape, pattern.slope_s) == ("drifting", pytest.approx(0.022e-3, rel=0.3))
    assert pattern.p_value < 0.01


def test_two_culprits_are_both_found_the_costlier_first():
    random = np.random.default_rng(4)
    culprits = [
        Culprit(2, "data", planted_seconds(random, "periodic", 0.2, 300, 10)),
        Culprit(0, "blocked", planted_seconds(random, "persistent", 0.4, 300)),
    ]
    found = stragglers(random, 4, 300, Noise(), culprits)
    assert [(late.rank, late.cause, late.shape) for late in found] == [
        (0, "blocked", "persistent"),
        (2, "data", "periodic"),
    ]


def cause_beside_others(computes, waits, collects_s=0.0):
    """Return the cause of the delay of rank 1.

    Args:
        computes: seconds on a core in a step, of each rank.
        waits: seconds for which each waits for a core, for each second that it has one.
        collects_s: seconds of rank 1's in which it collects garbage.
    """
    phases, counters, _ = made_up_run(np.random.default_rng(6), len(computes), 200, Noise())
    running_s = np.outer(computes, np.ones(200))
    waiting_s = running_s * np.array(waits)[:, np.newaxis]
    counters = [
        dataclasses.replace(own, running_s=ran, not_running_s=waited)
        for own, ran, waited in zip(counters, running_s, waiting_s, strict=True)
    ]
    counters[1] = dataclasses.replace(counters[1], gc_s=np.full(200, collects_s))
    forward = np.eye(phases[0].seconds.shape[1])[PHASES.index("forward")]
    phases = [
        dataclasses.replace(own, running_s=ran, seconds=np.outer(ran + waited, forward))
        for own, ran, waited in zip(phases, running_s, waiting_s, strict=True)
    ]
    return main_cause(1, phases, counters, np.ones(200, dtype=bool), starved=True)


@given(st.floats(1.2, 10), st.floats(0, 5))
def test_a_rank_that_computes_longer_on_a_core_as_busy_is_not_called_starved(longer, waits):
    """It waits for a core so much longer, by however many others it shares the core with."""
    assert cause_beside_others([BASE_S, longer * BASE_S], [waits, waits]) == "compute"


def test_a_rank_that_collects_garbage_also_waits_for_a_core_to_do_so():
    """So it was in bench/truth.py: 2 ms of it, and 4 ms more waiting for a busier core."""
    assert cause_beside_others([0.005, 0.0066], [0.88, 1.36], collects_s=0.0021) == "gc"


@given(st.floats(0.95, 1.05), st.floats(0, 1), st.floats(0.3, 5))
def test_a_rank_whose_core_others_take_is_called_starved(longer, waits, more):
    assert cause_beside_others([BASE_S, longer * BASE_S], [waits, waits + more]) == "not_running"


def test_a_rank_that_computes_four_times_as_long_on_a_core_that_is_busier_as_well_computes():
    """So it was with a late sender of bench/truth.py: 13 ms on a core, and 23 ms waiting for it."""
    assert cause_beside_others([0.003, 0.013], [0.14, 1.75]) == "compute"


def test_threads_of_a_pool_compute_for_the_main_thread():
    """The main thread sleeps while the pool computes longer: that is computing, not blocked."""
    random = np.random.default_rng(7)
    seconds = np.full(200, 0.4 * BASE_S)
    phases, counters, skew = made_up_run(random, 2, 200, Noise(), [Culprit(0, "blocked", seconds)])
    (asleep,) = find_stragglers(phases, counters, skew)
    phases[0] = dataclasses.replace(phases[0], running_s=phases[0].running_s + seconds)
    (pooled,) = find_stragglers(phases, counters, skew)
    assert (asleep.cause, pooled.cause) == ("blocked", "compute")


def test_a_delay_in_the_optimizer_alone_is_not_a_slow_core():
    random = np.random.default_rng(11)
    (found,) = stragglers(
        random, 2, 200, Noise(), [Culprit(0, "optimizer", np.full(200, 0.4 * BASE_S))]
    )
    assert (found.rank, found.cause) == (0, "compute")


@pytest.mark.parametrize(("other_bytes", "cause"), [(1 << 20, "slow_core"), (1 << 21, "compute")])
def test_optimizers_are_compared_only_if_ranks_train_equally_many_bytes(other_bytes, cause):
    """A pipeline's larger stage takes longer in all phases, on a core like the others'."""
    random = np.random.default_rng(12)
    phases, counters, skew = made_up_run(
        random, 2, 200, Noise(), [Culprit(0, "slow_core", np.full(200, 0.3 * BASE_S))]
    )
    counters[1] = dataclasses.replace(counters[1], trained_bytes=other_bytes)
    (found,) = find_stragglers(phases, counters, skew)
    assert (found.rank, found.cause) == (0, cause)


def test_a_rank_that_computes_more_on_a_slightly_slower_core_computes_more():
    random = np.random.default_rng(13)
    culprits = [
        Culprit(0, "compute", np.full(200, 0.4 * BASE_S)),
        Culprit(0, "slow_core", np.full(200, 0.05 * BASE_S)),
    ]
    (found,) = stragglers(random, 2, 200, Noise(), culprits)
    assert found.cause == "compute"


def test_a_rank_without_extra_time_in_any_phase_has_no_cause():
    """The skew says that it was late, its phases and counters that it was not: nobody is named."""
    phases, counters, skew = made_up_run(np.random.default_rng(10), 2, 100, Noise())
    phases, counters = [dataclasses.replace(phases[0], rank=i) for i in (0, 1)], [counters[0]] * 2
    skew = skew + np.array([[0.0], [BASE_S]])
    assert main_cause(1, phases, counters, np.ones(100, dtype=bool), starved=True) is None
    assert find_stragglers(phases, counters, skew) == ()


def test_a_rank_whose_extra_time_is_a_fraction_of_its_delay_is_not_named():
    """Its input takes 0.1 ms longer; it looks 3 ms late, since others wait for a core elsewhere."""
    random = np.random.default_rng(14)
    plant = [Culprit(0, "data", np.full(200, 0.0001))]
    phases, counters, skew = made_up_run(random, 2, 200, Noise(), plant)
    skew = skew + np.array([[0.003], [0.0]])
    assert find_stragglers(phases, counters, skew) == ()


# --- changes of all ranks -------------------------------------------------------------------------


def _shifts(factors, ranks=2, culprits=()):
    random = np.random.default_rng(1)
    noise = Noise(level=0.1, wander=0.03, bursts=0.2)
    phases, _, _ = made_up_run(random, ranks, len(factors), noise, culprits)
    return find_shifts(
        [
            dataclasses.replace(
                own, step_s=own.step_s * factors, seconds=own.seconds * factors[:, np.newaxis]
            )
            for own in phases
        ]
    )


def test_a_change_of_all_ranks_is_found_with_its_step_and_factor():
    (shift,) = _shifts(np.where(np.arange(600) < 300, 1.0, 12.0))
    assert abs(shift.step - 300) <= 2
    assert shift.factor == pytest.approx(12, rel=0.05)
    assert shift.after_ms == pytest.approx(shift.factor * shift.before_ms)


def test_a_slow_stretch_begins_and_ends():
    steps = np.arange(600)
    slow, fast = _shifts(np.where((steps >= 200) & (steps < 260), 1.6, 1.0), ranks=3)
    assert (abs(slow.step - 200) <= 3, abs(fast.step - 260) <= 3) == (True, True)
    assert slow.factor > 1.4
    assert fast.factor < 0.7


def test_a_change_near_the_end_is_found():
    (shift,) = _shifts(np.where(np.arange(600) < 575, 1.0, 3.0))
    assert abs(shift.step - 575) <= 3


def test_even_ranks_have_not_changed_and_neither_has_one_straggler():
    assert _shifts(np.ones(600)) == ()
    seconds = np.where(np.arange(600) < 300, 0.0, BASE_S)
    assert _shifts(np.ones(600), culprits=[Culprit(0, "data", seconds)]) == ()
    assert _shifts(np.ones(12)) == ()


def test_more_steps_than_are_looked_at_one_by_one():
    (shift,) = _shifts(np.where(np.arange(9000) < 6000, 1.0, 3.0))
    assert abs(shift.step - 6000) <= 10


def test_steps_that_are_all_waiting_have_a_finite_factor():
    (shift,) = _shifts(np.where(np.arange(600) < 300, 0.0, 1.0))
    assert (shift.step, np.isfinite(shift.factor)) == (300, True)


# --- the parts ------------------------------------------------------------------------------------


def test_the_best_range_equals_its_plain_form():
    random = np.random.default_rng(2)
    for _ in range(50):
        score = random.normal(0, 1, int(random.integers(1, 30)))
        sums = {
            (first, last): score[first : last + 1].sum()
            for first in range(len(score))
            for last in range(first, len(score))
        }
        assert sums[best_range(score)] == pytest.approx(max(sums.values()))


def test_tails_are_those_of_the_tables():
    assert upper_tail(1.6449) == pytest.approx(0.05, rel=1e-3)
    assert binomial_tail(10, 0, 0.5) == pytest.approx(2**-10)
    assert binomial_tail(0, 10, 0.5) == pytest.approx(1.0)
    assert binomial_tail(3, 1, 0.5) == pytest.approx(5 / 16)


def test_a_short_or_quiet_series_has_no_pattern():
    assert find_pattern(np.full(7, 1.0), np.zeros((1, 7)), RULES) is None
    assert find_pattern(np.zeros(100), np.zeros((1, 100)), RULES) is None
