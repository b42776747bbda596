"""Two values of a setting tried in a running job: the test, the schedule, the rank's session."""

import contextlib
import gc
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from paceline.core.errors import UsageError
from paceline.launch.tuning.paired_test import TuneRules, difference, judge
from paceline.launch.tuning.schedule import block_of
from paceline.launch.tuning.session import TuneSession
from paceline.launch.tuning.settings import TuneQuestion, parse_tune
from paceline.report.tuning import tune_words
from paceline.runs.tuning import TUNE_NAME, TuneResult

RULES = TuneRules()


def tried(random, change, noise):
    """Return the verdict on made-up pairs, with the estimate, and how many pairs it took."""
    blocks = np.exp(noise(random)).reshape(RULES.most_pairs, 2)  # as they follow each other
    begins_with = random.integers(2, size=RULES.most_pairs)
    rows = np.arange(RULES.most_pairs)
    first, second = blocks[rows, begins_with], blocks[rows, 1 - begins_with] * (1 + change)
    for pairs in RULES.looks:
        verdict, found = judge(first[:pairs], second[:pairs], RULES)
        if verdict != "undecided":
            return verdict, found, pairs
    raise AssertionError("the last look decides")


def heavy(level):
    return lambda random: level * random.standard_t(2, 2 * RULES.most_pairs)


def bursts(random):
    """Noise of a node: now and then some blocks running are twice as long, and steps drift."""
    count = 2 * RULES.most_pairs
    begins = np.flatnonzero(random.random(count) < 0.08)
    slow = np.zeros(count)
    for begin in begins:
        slow[begin : begin + random.integers(1, 6)] = 0.7
    return slow + np.linspace(0, 0.5, count) + 0.01 * random.standard_normal(count)


@pytest.mark.parametrize("noise", [heavy(0.05), bursts], ids=["heavy", "bursts"])
def test_equal_values_are_seldom_told_apart(noise):
    """At most 1 of 20 choices between equal values is false, however often the test looks."""
    random = np.random.default_rng(0)
    found = Counter(tried(random, 0.0, noise)[0] for _ in range(1000))
    assert found["first"] + found["second"] <= 0.05 * 1000 + 3 * (1000 * 0.05 * 0.95) ** 0.5


@pytest.mark.parametrize(("change", "verdict"), [(-0.05, "second"), (0.05, "first")])
def test_a_real_difference_is_found_early_with_its_size(change, verdict):
    random = np.random.default_rng(1)
    found = [tried(random, change, heavy(0.01)) for _ in range(300)]
    assert np.mean([outcome == verdict for outcome, _, _ in found]) > 0.95
    assert np.mean([pairs for _, _, pairs in found]) < RULES.most_pairs / 2
    assert np.median([estimate.change for _, estimate, _ in found]) == pytest.approx(
        change, rel=0.1
    )
    assert np.mean([estimate.low <= change <= estimate.high for _, estimate, _ in found]) > 0.95


def test_a_certain_difference_that_is_too_small_is_not_worth_a_change():
    first = np.linspace(1.0, 1.1, RULES.most_pairs)
    assert judge(first, first * 0.998, RULES)[0] == "equal"
    assert judge(first[:9], first[:9], RULES) == ("undecided", None)


def test_p_values_are_those_of_all_combinations_of_signs():
    logs = np.array([0.3, -0.1, 0.2, 0.5, 0.45, -0.05, 0.7])
    ranks = np.argsort(np.argsort(np.abs(logs))) + 1
    above = ranks[logs > 0].sum()
    half = ranks.sum() / 2
    sums = [ranks[list(signs)].sum() for signs in
            itertools.product([False, True], repeat=len(logs))]  # fmt: skip
    expected = np.mean([abs(total - half) >= abs(above - half) for total in sums])
    assert difference(logs, 0.05).p_value == pytest.approx(expected)


def test_each_pair_has_both_values_in_an_order_by_lot():
    rules = TuneRules()
    end = rules.warm_up_steps + 2 * rules.most_pairs * rules.block_steps
    blocks = [block_of(step, rules, 5) for step in range(end + 5)]
    assert blocks[: rules.warm_up_steps] == [None] * rules.warm_up_steps
    assert blocks[end:] == [None] * 5
    begins = [block for block in blocks if block is not None and block.step == 0]
    by_pair = {
        pair: [block.value for block in begins if block.pair == pair]
        for pair in range(rules.most_pairs)
    }
    assert all(sorted(values) == [0, 1] for values in by_pair.values())
    assert 8 < sum(values[0] for values in by_pair.values()) < 24


def test_questions_are_checked():
    assert parse_tune("gc-threshold=700,20000") == TuneQuestion("gc-threshold", 700, 20_000)
    for wrong in ("bucket=1,2", "threads=1", "threads=1,1", "threads=0,1", "threads=a,b", ""):
        with pytest.raises(UsageError):
            parse_tune(wrong)


class SteppedClock:
    """A clock that a test moves."""

    def __init__(self):
        self.at_s = 0.0

    def now_s(self):
        return self.at_s


@contextlib.contextmanager
def session(folder, question, exchange=lambda seconds: seconds):
    before = gc.get_threshold()
    found = TuneSession(question, folder, 0, clock=SteppedClock(), exchange=exchange)
    try:
        yield found
    finally:
        found._hook.remove()
        gc.set_threshold(*before)


def run_steps(found, steps, seconds_of):
    """Train so many steps of a real optimizer; return the threshold in each."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    values = []
    for step in range(steps):
        values.append(gc.get_threshold()[0])
        found.clock.at_s += seconds_of(step, values[-1])
        optimizer.step()
    return values


QUESTION = TuneQuestion("gc-threshold", 900, 9000)


def test_the_better_value_is_kept_from_the_first_look_on(tmp_path):
    random = np.random.default_rng(3)
    with session(tmp_path, QUESTION) as found:
        values = run_steps(
            found, 200, lambda _, value: (1.0 if value == 900 else 0.9) * random.uniform(0.99, 1.01)
        )
    result = TuneResult.from_text((tmp_path / TUNE_NAME).read_text())
    assert (result.verdict, result.kept, len(result.pairs)) == ("second", 9000, 8)
    assert result.change == pytest.approx(-0.1, abs=0.01)
    assert result.step == RULES.warm_up_steps + 2 * 8 * RULES.block_steps
    assert set(values[result.step :]) == {9000}
    assert "9000 is better than 900" in tune_words(result)
    assert values.count(900) == 8 * RULES.block_steps


def test_equal_values_end_with_the_first_one(tmp_path):
    random = np.random.default_rng(4)
    steps = RULES.warm_up_steps + 2 * RULES.most_pairs * RULES.block_steps + 10
    with session(tmp_path, QUESTION) as found:
        values = run_steps(found, steps, lambda *_: random.uniform(0.9, 1.1))
    result = TuneResult.from_text((tmp_path / TUNE_NAME).read_text())
    assert (result.verdict, result.kept, values[-1]) == ("equal", 900, 900)
    assert "No difference" in tune_words(result)


def test_a_script_that_sets_the_value_itself_is_left_alone(tmp_path):
    with session(tmp_path, QUESTION) as found:
        gc.set_threshold(5000)
        values = run_steps(found, 50, lambda *_: 1.0)
    result = TuneResult.from_text((tmp_path / TUNE_NAME).read_text())
    assert set(values) == {5000}
    assert result.verdict == "stopped"
    assert "the script sets gc-threshold itself" in tune_words(result)


def test_ranks_that_do_not_agree_keep_the_first_value(tmp_path):
    def fail(_):
        raise RuntimeError("timed out")

    with session(tmp_path, QUESTION, exchange=fail) as found:
        values = run_steps(found, 200, lambda _, value: 1.0 if value == 900 else 0.5)
    result = TuneResult.from_text((tmp_path / TUNE_NAME).read_text())
    assert (result.verdict, values[-1]) == ("stopped", 900)
    assert "timed out" in tune_words(result)


def test_another_optimizer_ends_no_step(tmp_path):
    with session(tmp_path, QUESTION) as found:
        first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in (first, second)]
        for _ in range(7):
            for optimizer in optimizers:
                optimizer.step()
        assert found._step == 7
    assert tune_words(None) == ""
