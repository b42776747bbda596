"""A node is passed over only while a replica is several times as fast."""

import pytest

from paceline.core.clock import ManualClock
from paceline.store.serve.link_rates import LinkRates


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def rates(clock):
    found = LinkRates(clock)
    for _ in range(4):
        found.note("a", 1_000_000, 1.0)
        found.note("b", 1_000_000, 1.0)
    return found


def test_the_order_stays_as_it_is_while_nobody_is_known_to_be_slow(rates):
    assert rates.order(["b", "a", "new"]) == ["b", "a", "new"]
    for _ in range(4):
        rates.note("b", 1_000_000, 3.0)  # busy
    assert rates.order(["b", "a"]) == ["b", "a"]


def test_a_slow_one_comes_last_and_is_tried_again_now_and_then(rates, clock, caplog):
    for _ in range(4):
        rates.note("b", 1_000_000, 20.0)
    assert rates.order(["b", "a"]) == ["a", "b"]
    assert rates.order(["b"]) == ["b"]  # nobody else has it
    assert caplog.text.count("replicas are read") == 1
    clock.advance(6.0)
    assert rates.order(["b", "a"]) == ["b", "a"]  # one read tries it
    assert rates.order(["b", "a"]) == ["a", "b"]  # the others do not, meanwhile
    for _ in range(2):
        clock.advance(6.0)
        rates.order(["b", "a"])
        rates.note("b", 1_000_000, 1.0)
    assert rates.order(["b", "a"]) == ["b", "a"]


def test_answers_without_bytes_or_time_say_nothing(rates):
    for _ in range(9):
        rates.note("b", 0, 100.0)
        rates.note("b", 1_000, 0.0)
    assert rates.order(["b", "a"]) == ["b", "a"]
