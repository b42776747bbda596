"""The report of a federation: medians over seeds, the verdict, the page."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.report.federation.figures import (
    by_class,
    by_cluster,
    by_group,
    comparison,
    seconds_to_target,
    smoothed,
    time_to_accuracy,
    unpaid,
    verdict,
)
from paceline.report.federation.model import (
    FederationPay,
    FederationReport,
    FederationRun,
    UnpaidWork,
)
from paceline.report.federation.page import render_federation_page
from paceline.report.federation.payments import conservation


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
    flat = "accuracy has not risen for 20 evaluations"
    runs = (
        run_of("fast", 0, 20.0, alarms=(alarm, flat)),
        run_of("empty", 0, None, at_s=np.array([]), accuracy=np.array([]), returned=np.zeros(3)),
    )
    page = render_federation_page(report_of(*runs))
    assert "<b>" not in page.partition("<main>")[0].partition("</style>")[2]
    assert "clinics &lt;b&gt;" in page
    assert "fast, seed 0: accuracy fell" in page
    assert "fast, seed 0: accuracy has not risen" in page
    assert 'id="accuracy"' in page
    assert 'id="participation"' in page


def test_times_classes_and_groups_are_medians_over_seeds():
    first = run_of(
        "fast",
        0,
        20.0,
        at_s=np.array([10.0, 20.0, 30.0]),
        accuracy=np.array([0.4, 0.8, 0.9]),
        by_class=np.array([[0.2, 0.6], [0.8, 0.8], [0.8, 1.0]]),
        by_group={"slow": np.array([0.3, 0.6, 0.9])},
        worst_clients=0.25,
    )
    second = run_of(
        "fast",
        1,
        None,
        at_s=np.array([5.0]),
        accuracy=np.array([0.55]),
        by_class=np.array([[0.4, 0.6]]),
        by_group={"slow": np.array([0.2])},
        worst_clients=0.15,
    )
    report = report_of(first, second)
    assert smoothed(np.array([0.3, 0.6, 0.9, 0.6])).tolist() == [
        pytest.approx(value) for value in (0.3, 0.45, 0.6, 0.7)
    ]
    heads, rows = time_to_accuracy(report)
    assert heads[1:3] == ["s to 50 %", "s to 60 %"]
    assert rows[0][1:4] == ["12.50", "-", "-"]  # a mark that one of two seeds reached has no median
    assert by_class(report) == (["strategy", "class 0", "class 1"], [["fast", "50 %", "70 %"]])
    assert by_group(report)[1] == [["fast", "40 %", "20 %"]]


def test_clusters_are_listed_from_the_poorest_on():
    found = {
        "by_cluster": np.array([[0.5, np.nan], [0.9, 0.3]]),
        "cluster_of": np.array([0, 1, 0]),
        "by_class": np.ones((2, 2)),
    }
    report = report_of(run_of("fast", 0, 20.0, **found), run_of("none", 0, None))
    heads, rows = by_cluster(report)
    assert heads == ["strategy", "cluster 1", "cluster 2"]
    assert rows == [["fast", "30 % (1 client)", "70 % (2 clients)"]]
    page = render_federation_page(report)
    assert 'id="clusters"' in page
    assert "nan" not in page.partition("<main>")[2].lower()


def test_the_page_says_who_was_not_paid_and_that_no_token_was_lost():
    row = UnpaidWork(client="7<", check="deadline", count=3, reason="no answer within 30 s")
    flows = (("providers", 900_000_000), ("infrastructure", 100_000_000))
    pay = FederationPay(
        issued=1_000_000_000,
        flows=flows,
        by_client={"1": 300_000_000, "2": 600_000_000},
        consumers=("consumer",),
        verification="All 3 blocks were verified.",
        is_sound=True,
    )
    report = replace(report_of(run_of("fast", 0, 20.0, unpaid=(row,))), pay=pay)
    assert unpaid(report)[1] == [["7<", "deadline", "no answer within 30 s", "3"]]
    assert "add up to the 1,000.00 tokens that were issued, exactly." in conservation(pay)
    page = render_federation_page(report)
    assert "7&lt;" in page
    assert "All 3 blocks were verified." in page
    lost = replace(pay, flows=flows[:1], verification="The ledger is damaged.", is_sound=False)
    assert "add up to 900.00 tokens, and 1,000.00 were issued" in conservation(lost)
    page = render_federation_page(replace(report, pay=lost))
    assert "The ledger is damaged." in page.partition("<main>")[0]
