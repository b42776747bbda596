"""The pacer of refills, under a virtual clock: bounds, no starvation, quiet where it says so."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.store.feed.pacing import NEXT_EVENT_S, QUIET_SHARE, Pacer, Stock, TokenBucket


class SimulatedLoader:
    """A loop with one worker and a pacer; all durations are in seconds of a virtual clock.

    A step: the batch is taken, compute, then a part that leaves cores free, if it shows.
    """

    def __init__(self, ahead, bytes_ahead, *, paced=True, shows_phases=True):
        self.ahead, self.bytes_ahead = ahead, bytes_ahead
        self.pacer = Pacer(ahead, bytes_ahead) if paced else None
        self.shows_phases = shows_phases
        self.now_s = 0.0
        self.made, self.making = [], None  # sizes that are ready; (size, end) of the worker's
        self.drawn = 0
        self.begins = []  # (time, part of the step) of each refill
        self.part = "start"
        self.peak_bytes = 0.0
        self.waited_s = 0.0

    def in_flight(self):
        return sum(self.made) + (self.making[0] if self.making else 0)

    def run(self, sizes, make_s, compute_s, free_s):
        sizes = list(sizes)
        for _ in range(len(sizes)):
            if self.pacer and not self.made:
                self.pacer.loop_waits()
            self.part, begun_s = "wait", self.now_s
            while not self.made:
                self.advance(math.inf, sizes, make_s)
            self.waited_s += self.now_s - begun_s
            self.made.pop(0)
            if self.pacer:
                self.pacer.step_begins(self.now_s)
            self.part = "quiet"
            self.advance(self.now_s + compute_s * QUIET_SHARE, sizes, make_s)
            self.part = "compute"
            self.advance(self.now_s + compute_s * (1 - QUIET_SHARE), sizes, make_s)
            self.part = "free"
            if self.pacer and self.shows_phases:
                self.pacer.cores_are_free()
            self.advance(self.now_s + free_s, sizes, make_s)

    def advance(self, until_s, sizes, make_s):
        """Let the worker work until then, or until a batch is ready where that is infinite."""
        for _ in range(10_000):
            asked_s = math.inf
            if self.making is None and self.drawn < len(sizes):
                wait_s = self.wait_s(sizes[self.drawn])
                if wait_s == 0:
                    self.begin(sizes[self.drawn], make_s)
                    continue
                asked_s = max(self.now_s + wait_s, math.nextafter(self.now_s, math.inf))
            next_s = min(until_s, asked_s, self.making[1] if self.making else math.inf)
            assert next_s < math.inf, "the loop waits, and the pacer holds everything back"
            self.now_s = max(self.now_s, next_s)
            if self.making and self.making[1] <= self.now_s:
                self.made.append(self.making[0])
                self.making = None
                if until_s == math.inf:
                    return
            elif next_s == until_s:
                return
        pytest.fail("the pacer asks to be asked again without end")

    def wait_s(self, size):
        count = len(self.made) + (self.making is not None)
        if count and (count >= self.ahead or self.in_flight() + size > self.bytes_ahead):
            return math.inf
        if self.pacer is None:
            return 0.0
        return self.pacer.wait_s(size, Stock(len(self.made), self.in_flight()), self.now_s)

    def begin(self, size, make_s):
        if self.pacer:
            self.pacer.refill_begins(size, self.now_s)
        self.making = (size, self.now_s + make_s)
        self.drawn += 1
        self.begins.append((self.now_s, self.part))
        self.peak_bytes = max(self.peak_bytes, self.in_flight())


SECONDS = st.floats(0.01, 2.0)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    *(st.integers(1, 6), st.integers(1, 3000)),
    *(SECONDS, SECONDS, SECONDS, st.booleans()),
)
@settings(max_examples=examples(150), deadline=None)
def test_bytes_in_flight_stay_bounded_and_every_batch_comes(
    sizes, ahead, bytes_ahead, make_s, compute_s, free_s, shows
):
    loader = SimulatedLoader(ahead, bytes_ahead, shows_phases=shows)
    loader.run(sizes, make_s, compute_s, free_s)
    assert loader.drawn == len(sizes)
    assert loader.peak_bytes <= max(bytes_ahead, *sizes)


@given(st.integers(2, 6), SECONDS, SECONDS, SECONDS, st.integers(5, 40), st.integers(1, 1000))
@settings(max_examples=examples(150), deadline=None)
def test_a_loader_that_limits_the_loop_is_not_slowed(ahead, make_s, compute_s, free_s, steps, size):
    """Whatever the durations are, the loop waits as without a pacer while nothing is ready."""
    make_s += compute_s + free_s  # slower than the loop
    paced, plain = (SimulatedLoader(ahead, 10**9, paced=p) for p in (True, False))
    for loader in (paced, plain):
        loader.run([size] * steps, make_s, compute_s, free_s)
    assert paced.now_s == pytest.approx(plain.now_s)


@given(st.integers(2, 6), SECONDS, SECONDS, st.integers(10, 40), st.floats(0.05, 0.9))
@settings(max_examples=examples(150), deadline=None)
def test_a_loader_with_time_to_spare_works_where_cores_are_free(
    ahead, compute_s, free_s, steps, share
):
    loader = SimulatedLoader(ahead, 10**9)
    loader.run([1] * steps, free_s * share, compute_s, free_s)
    settled = [part for _, part in loader.begins[ahead + 2 :]]
    assert set(settled) <= {"free"}
    assert loader.waited_s <= free_s * (ahead + 2)  # at the start alone


def test_without_phases_nothing_is_held_back():
    loader = SimulatedLoader(4, 10**9, shows_phases=False)
    loader.run([1] * 20, 0.1, 1.0, 1.0)
    assert [part for _, part in loader.begins[5:]] == ["quiet"] * 15


def test_the_beginning_of_a_step_is_quiet_though_stock_is_low():
    pacer = Pacer(8, 10**9)
    for now_s in (0.0, 10.0):
        pacer.step_begins(now_s)
        pacer.cores_are_free()
    pacer.step_begins(20.0)
    assert pacer.wait_s(1, Stock(1, 1), 20.0) == pytest.approx(10 * QUIET_SHARE)
    assert pacer.wait_s(1, Stock(0, 1), 20.0) == 0
    assert pacer.wait_s(1, Stock(4, 1), 25.0) == pytest.approx(5)
    pacer.loop_waits()
    assert pacer.wait_s(1, Stock(1, 1), 20.0) == 0


def test_bytes_are_bounded_whatever_the_loop_does():
    pacer = Pacer(8, 100)
    pacer.loop_waits()
    assert pacer.wait_s(60, Stock(0, 50), 0.0) == NEXT_EVENT_S
    assert pacer.wait_s(500, Stock(0, 0), 0.0) == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 500)), max_size=60))
@settings(deadline=None)
def test_a_bucket_never_grants_more_than_rate_and_capacity(asks):
    bucket, granted, now_s = TokenBucket(10.0, 100.0), 0, 0.0
    for pause_s, size in asks:
        now_s += pause_s
        if bucket.wait_s(size, now_s) == 0:
            bucket.take(size, now_s)
            # A size above the capacity is granted from a full bucket and paid for afterwards, up to
            # a debt of one capacity.
            granted += min(size, 200)
            assert granted <= 100 + 10 * now_s + 100 + 1e-6
            if all(other <= 100 for _, other in asks):
                assert granted <= 100 + 10 * now_s + 1e-6
