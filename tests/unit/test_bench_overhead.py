"""The estimator of bench/record_overhead.py: pairs of blocks, and a control that can say "no"."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.core.allocator import KEEP

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("record_overhead")
    finally:
        sys.path.remove(str(BENCH))


class Collected:
    """A report that only collects."""

    def __init__(self):
        self.rows, self.bars = [], []

    def row(self, **values):
        self.rows.append(values)

    def bar(self, name, value, limit, *, reason):
        self.bars.append((name, value, limit, reason))


def block(cpu_ms, wall_ms=50.0, writer_ms=0.0):
    return {
        "wall": wall_ms / 1e3,
        "cpu": np.full(2, cpu_ms / 1e3),
        "writer": np.full(2, writer_ms / 1e3),
    }


def launches(noise_ms, added_ms=0.2):
    """Two launches of pairs whose blocks drift together, and differ by a known time."""
    pairs = [(40.0 + drift, sign * noise_ms) for drift in range(5) for sign in (-1, 1)]
    kinds = {
        "on": [(block(base + added_ms, writer_ms=0.05), block(base)) for base, _ in pairs],
        "nothing": [(block(base + noise), block(base)) for base, noise in pairs],
    }
    kinds["paused"] = kinds["launcher"] = kinds["nothing"]
    return [{"long": kinds}, {"long": kinds}]


def test_what_is_added_is_the_median_of_neighbours_and_the_writers_time(bench):
    report = Collected()
    added, reach = bench.judge(report, launches(0.0), "long")
    assert added["median"] == pytest.approx(0.25e-3)
    assert added["low"] == pytest.approx(0.25e-3)
    assert reach == pytest.approx(0.0)
    assert {row.get("clock") for row in report.rows} >= {"wall", "cpu"}


@pytest.mark.parametrize(("noise_ms", "can_tell"), [(0.1, True), (0.9, False)])
def test_a_control_wider_than_the_bar_leaves_it_open(bench, noise_ms, can_tell):
    report = Collected()
    added, reach = bench.judge(report, launches(noise_ms), "long")
    bench.add_bar(report, "share", added, reach, 0.01 * 0.05, 0.05)
    ((name, value, limit, reason),) = report.bars
    assert (name, limit) == ("share", pytest.approx(0.01))
    assert value == (pytest.approx(0.005) if can_tell else None)
    assert ("cannot tell here" in reason) == (not can_tell)
    assert f"{reach / 0.05:.3g}" in reason


def test_both_jobs_have_the_allocator_of_paceline_run(bench):
    assert KEEP.items() <= bench.ENVIRONMENT.items()
