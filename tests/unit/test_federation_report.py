"""The report of a federation: medians over seeds, the verdict, the page."""

from __future__ import annotations

import math

import numpy as np

from paceline.report.federation.figures import comparison, seconds_to_target, verdict
from paceline.report.federation.model import FederationReport, FederationRun
from paceline.report.federation.page import render_federation_page


def run_of(strategy, seed, seconds, **changes):
    values = {
        "strategy": strategy,
        "seed": seed,
        "to_target_s": seconds,
        "final": 0.8,
        "worst_class": 0.5,
        "fairness": 0.6,
        "never_used": 0.1,
        "never_online": 0.05,
        "waste": 0.02,
        "sent_bytes": 4_000_000_000,
        "at_s": np.array([10.0, 20.0]),
        "accuracy": np.array([0.4, 0.8]),
        "returned": np.array([3, 1, 2]),
        "alarms": (),
    }
    return FederationRun(**{**values, **changes})


def report_of(*runs):
    return FederationReport(
        title="clinics <b>", summary="3 clients", target=0.8, budget_s=900.0, runs=runs
    )


def test_a_median_over_seeds_counts_those_that_never_reached_the_target():
    assert seconds_to_target([run_of("a", n, s) for n, s in enumerate((30.0, 10.0, None))]) == 30
    assert seconds_to_target([run_of("a", 0, 10.0), run_of("a", 1, None)]) is None
    assert seconds_to_target([run_of("a", 0, None)]) is None
    even = [run_of("a", n, s) for n, s in enumerate((10.0, 20.0, 30.0, None))]
    assert seconds_to_target(even) == 25
    assert math.isfinite(seconds_to_target(even))


def test_the_verdict_names_the_fastest_and_the_next():
    report = report_of(run_of("slow", 0, 50.0), run_of("fast", 0, 20.0), run_of("never", 0, None))
    assert verdict(report) == (
        "80 % is reached soonest by fast: after 20 s. Next is slow, which takes 2.50 times as long."
    )
    assert "No strategy reached 80 %" in verdict(report_of(run_of("never", 0, None)))
    heads, rows = comparison(report)
    assert [row[0] for row in rows] == ["slow", "fast", "never"]
    assert rows[2][1:3] == ["-", "0 of 1"]
    assert len(heads) == len(rows[0])


def test_the_page_escapes_names_and_shows_a_divergence():
    alarm = "accuracy fell from 0.500 to 0.300: the model diverges"
    runs = (
        run_of("fast", 0, 20.0, alarms=(alarm, "accuracy has not risen for 20 evaluations")),
        run_of("empty", 0, None, at_s=np.array([]), accuracy=np.array([]), returned=np.zeros(3)),
    )
    page = render_federation_page(report_of(*runs))
    assert "<b>" not in page.partition("<main>")[0].partition("</style>")[2]
    assert "clinics &lt;b&gt;" in page
    assert "fast, seed 0: accuracy fell" in page
    assert "has not risen" not in page
    assert 'id="accuracy"' in page
    assert 'id="participation"' in page
