"""What is tuned by measuring: the best is found, used most, and found again when it changes."""

import itertools

import pytest

from paceline.store.feed.node.tuning import HillClimb, ReadTuner


def values_of(climb, rate_of, periods):
    """Feed a climb with the rates of its values; return the values that it used."""
    used = []
    for _ in range(periods):
        used.append(climb.value)
        climb.decide(rate_of(climb.value))
    return used


def rates_with(best):
    return lambda value: 1000 / (1 + abs(value.bit_length() - best.bit_length()))


@pytest.mark.parametrize("best", [1, 2, 4, 8])
def test_the_best_value_is_found_and_tried_ever_less_against_others(best):
    climb = HillClimb(8)
    used = values_of(climb, rates_with(best), 100)
    assert climb.best == best
    assert used[50:].count(best) >= 45


def test_a_best_value_that_moves_is_found_again():
    climb = HillClimb(8)
    values_of(climb, rates_with(8), 100)
    values_of(climb, rates_with(1), 100)
    assert climb.best == 1
    values_of(climb, rates_with(4), 100)
    assert climb.best == 4


def test_a_value_that_is_hardly_better_is_not_taken():
    climb = HillClimb(8)
    values_of(climb, lambda value: 1000 + value.bit_length(), 50)
    assert climb.best == 8
    assert set(values_of(HillClimb(1), lambda value: 1.0, 10)) == {1}


def test_one_at_a_time_is_found_where_any_more_are_equally_slow():
    climb = HillClimb(64)
    used = values_of(climb, lambda value: 100.0 if value == 1 else 10.0, 100)
    assert climb.best == 1
    assert used.index(1) < 10
    assert used[50:].count(1) >= 45


def test_a_climb_starts_where_it_is_told_within_its_range():
    climb = HillClimb(8)
    for wanted, value in ((4, 4), (100, 8), (0, 1)):
        climb.start_at(wanted)
        assert (climb.value, climb.best) == (value, value)


@pytest.mark.parametrize(("depth", "windows"), itertools.product([1, 2, 8], [1, 4]))
def test_depth_and_windows_are_found_one_beside_the_other(depth, windows):
    tuner = ReadTuner(HillClimb(8), HillClimb(4))
    by_depth, by_windows = rates_with(depth), rates_with(windows)
    for _ in range(600):
        rate = by_depth(tuner.depth.value) * by_windows(tuner.windows.value)
        tuner.record(1_000_000, 1_000_000 / rate)
        is_trial = [climb.value != climb.best for climb in (tuner.depth, tuner.windows)]
        assert not all(is_trial)
    assert (tuner.depth.best, tuner.windows.best) == (depth, windows)


def test_windows_are_tuned_where_there_is_no_choice_of_depth():
    tuner = ReadTuner(HillClimb(1), HillClimb(4))
    for _ in range(200):
        tuner.record(1000, tuner.windows.value / 4)
    assert tuner.windows.best == 1
