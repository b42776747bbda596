"""Scaling curves are concave envelopes, and shared devices are never worth more than they are."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduler.job import Job
from paceline.scheduler.placement import Shape
from paceline.scheduler.rates.curve import PRIORS, Curve, knee
from paceline.scheduler.rates.sharing import (
    MeasuredPairs,
    PairKey,
    PairTable,
    ResourceVectors,
)
from paceline.scheduler.rates.topology import Exchange, distance_factor
from paceline.scheduler.simulate.synthetic import FAST_LEVELS, SLOW_LEVELS

rates = st.floats(0.01, 1000)
points = st.dictionaries(st.integers(1, 64), rates, min_size=1, max_size=8)
ONE = Shape("v100", (1,), 0)


@given(points)
def test_the_envelope_is_above_the_points_monotone_and_concave(measured):
    curve = Curve(measured.items())
    values = [0.0] + [curve.rate(devices) for devices in range(1, 70)]
    for devices, rate in measured.items():
        assert values[devices] >= rate * (1 - 1e-9)
    gains = [after - before for before, after in itertools.pairwise(values)]
    tolerance = 1e-9 * max(values)
    assert all(gain >= -tolerance for gain in gains)
    assert all(later <= earlier + tolerance for earlier, later in itertools.pairwise(gains))


@given(points.filter(lambda p: len(p) > 1))
def test_the_envelope_bends_only_where_it_was_measured(measured):
    """So no lower curve is concave, monotone and above the points."""
    curve = Curve(measured.items())
    values = [0.0] + [curve.rate(devices) for devices in range(1, 70)]
    tolerance = 1e-9 * max(values)
    for devices in range(1, 69):
        bend = 2 * values[devices] - values[devices - 1] - values[devices + 1]
        if bend > tolerance:
            assert values[devices] == pytest.approx(measured[devices])


@given(points, st.floats(0.01, 1), st.integers(1, 64))
def test_the_knee_is_the_last_device_that_pays(measured, threshold, limit):
    curve = Curve(measured.items())
    paying = [
        devices
        for devices in range(2, limit + 1)
        if curve.rate(devices) - curve.rate(devices - 1) >= threshold * curve.rate(1)
    ]
    on_curve = [curve.rate(devices) for devices in range(1, limit + 1)]
    assert knee(on_curve, threshold) == max(paying, default=1)


@given(st.sampled_from(sorted(PRIORS)), st.integers(1, 64), rates)
def test_one_point_takes_the_shape_of_its_prior(name, devices, rate):
    curve = Curve([(devices, rate)], PRIORS[name])
    assert curve.rate(devices) >= rate * (1 - 1e-9)
    assert curve.rate(1) <= curve.rate(1024)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=2),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_resource_vectors_respect_memory_and_the_bottleneck(used, first_gib, second_gib):
    model = ResourceVectors({"p0": used[0], "p1": used[1]}, {"v100": 16 << 30}, interference=0.05)
    first = Job(name="a", profile="p0", memory_bytes=first_gib << 30)
    second = Job(name="b", profile="p1", memory_bytes=second_gib << 30)
    kept = model.kept(first, [second], ONE)
    if first_gib + second_gib > 16:
        assert kept == 0
    else:
        load = max(sum(column) for column in zip(*used, strict=True))
        assert kept == pytest.approx(0.95 / max(1.0, load))
    assert model.kept(first, [], ONE) == 1.0


def test_pairs_that_were_not_measured_do_not_share():
    table = PairTable({PairKey("v100", 1, "a", "b"): 0.7})
    a, b = Job(name="1", profile="a"), Job(name="2", profile="b")
    assert table.kept(a, [b], ONE) == 0.7
    assert table.kept(b, [a], ONE) == 0.0
    assert table.kept(a, [b, b], ONE) == 0.0


def test_measured_pairs_go_before_the_estimate_but_not_before_memory():
    used = {"a": (0.5,), "b": (0.5,)}
    model = MeasuredPairs({"a": {"b": 0.6}}, ResourceVectors(used, {"v100": 16 << 30}, most=3))
    a = Job(name="1", profile="a", memory_bytes=9 << 30)
    b = Job(name="2", profile="b", memory_bytes=6 << 30)
    assert model.kept(a, [b], ONE) == 0.6
    assert model.kept(b, [a], ONE) == pytest.approx(0.95)  # not measured
    assert model.kept(b, [b, b], ONE) == 0  # 18 GiB
    assert model.kept(a, [], ONE) == 1
    assert model.kept(a, [replace(b, memory_bytes=8 << 30)], ONE) == 0


@given(st.floats(1e6, 1e9), st.floats(0.01, 1), st.integers(2, 64))
def test_distance_never_helps_and_fast_links_cost_less_than_slow_ones(volume, compute_s, devices):
    exchange = Exchange(volume, compute_s)
    fast = distance_factor(exchange, devices, 1, FAST_LEVELS)
    slow = distance_factor(exchange, devices, 1, SLOW_LEVELS)
    assert 0 < slow <= 1
    assert 0 < fast <= 1
    assert distance_factor(exchange, devices, 0, SLOW_LEVELS) == 1
    assert math.isfinite(slow)
