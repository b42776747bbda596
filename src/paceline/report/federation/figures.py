"""The table of strategies, as rows of text that terminal and page share."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from paceline.report.units import format_share, plural, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.report.federation.model import FederationReport, FederationRun


_SMOOTHED = 3  # evaluations
_MARKS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.82, 0.85, 0.9, 0.95)  # accuracies that a table has
_MOST_UNPAID = 20  # rows


def seconds_to_target(runs: Sequence[FederationRun]) -> float | None:
    """Return the median simulated seconds to the target over the seeds.

    None where fewer than half of the seeds reached it: the median is unknown then.
    """
    reached = sorted(run.to_target_s for run in runs if run.to_target_s is not None)
    if 2 * len(reached) <= len(runs):
        return None
    return statistics.median([*reached, *[float("inf")] * (len(runs) - len(reached))])


def comparison(report: FederationReport) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: medians over the seeds of each strategy."""
    target = format_share(report.target)
    heads = ["strategy", f"s to {target}", f"reached {target}", "accuracy", "worst class"]
    heads += ["fairness", "never used", "never online", "wasted", "GB sent"]
    rows = []
    for name, runs in report.by_strategy.items():

        def median(field: str, runs: Sequence[FederationRun] = runs) -> float:
            return float(statistics.median(getattr(run, field) for run in runs))

        seconds = seconds_to_target(runs)
        reached = sum(run.to_target_s is not None for run in runs)
        rows.append(
            [
                name,
                "-" if seconds is None else significant(seconds, 4),
                f"{reached} of {len(runs)}",
                *(format_share(median(field)) for field in ("final", "worst_class")),
                f"{median('fairness'):.2f}",
                *(format_share(median(field)) for field in ("never_used", "never_online", "waste")),
                significant(median("sent_bytes") / 1e9),
            ]
        )
    return heads, rows


def smoothed(accuracy: np.ndarray) -> np.ndarray:
    """Return the mean of each evaluation and up to two before it; shape as given."""
    total = np.cumsum(np.concatenate([[0.0], accuracy]))
    ends = np.arange(1, accuracy.size + 1)
    begins = np.maximum(0, ends - _SMOOTHED)
    means: np.ndarray = (total[ends] - total[begins]) / (ends - begins)
    return means


def time_to_accuracy(report: FederationReport) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: median seconds of each strategy to several accuracies."""
    reached = max(
        (float(run.accuracy.max()) for run in report.runs if run.accuracy.size), default=0
    )
    marks = sorted({*(mark for mark in _MARKS if mark <= reached), report.target})
    rows = []
    for name, runs in report.by_strategy.items():
        cells = []
        for mark in marks:
            times = [_seconds_to(run, mark) for run in runs]
            known = [seconds for seconds in times if seconds is not None]
            is_known = 2 * len(known) > len(runs)
            padded = [*known, *[float("inf")] * (len(runs) - len(known))]
            cells.append(significant(statistics.median(padded), 4) if is_known else "-")
        rows.append([name, *cells])
    return ["strategy", *(f"s to {format_share(mark)}" for mark in marks)], rows


def _seconds_to(run: FederationRun, accuracy: float) -> float | None:
    above = np.flatnonzero(smoothed(run.accuracy) >= accuracy)
    return float(run.at_s[above[0]]) if above.size else None


def by_class(report: FederationReport) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: accuracy on each class in the end, medians over the seeds."""
    classes = max((run.by_class.shape[1] for run in report.runs), default=0)
    rows = []
    for name, runs in report.by_strategy.items():
        last = [run.by_class[-_SMOOTHED:].mean(0) for run in runs if run.by_class.size]
        if last:
            rows.append([name, *map(format_share, np.median(last, axis=0).tolist())])
    return ["strategy", *(f"class {number}" for number in range(classes))], rows


def by_group(report: FederationReport) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: accuracy for groups of clients in the end, medians over the seeds."""
    groups = list(dict.fromkeys(name for run in report.runs for name in run.by_group))
    rows = []
    for name, runs in report.by_strategy.items():
        known = [run for run in runs if run.by_group]
        if known:
            last = [
                [float(run.by_group[group][-_SMOOTHED:].mean()) for group in groups]
                for run in known
            ]
            poorest = float(np.median([run.worst_clients for run in known]))
            shares = [*np.median(last, axis=0).tolist(), poorest]
            rows.append([name, *map(format_share, shares)])
    heads = [*(f"{group} clients" for group in groups), "poorest tenth"]
    return ["strategy", *heads], rows


def by_cluster(report: FederationReport) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: accuracy for clusters of clients in the end, with the first seed."""
    first = [runs[0] for runs in report.by_strategy.values() if runs[0].by_cluster.size]
    rows = [[run.strategy, *(text for _, text in clusters_of(run))] for run in first]
    most = max((len(row) - 1 for row in rows), default=0)
    return ["strategy", *(f"cluster {number}" for number in range(1, most + 1))], [
        [*row, *["-"] * (most + 1 - len(row))] for row in rows
    ]


def clusters_of(run: FederationRun) -> list[tuple[int, str]]:
    """Return the numbers of a run's clusters, the poorest first, with accuracy and clients."""
    last = np.nanmean(run.by_cluster[-_SMOOTHED:], axis=0)
    found = []
    for number in np.argsort(last, kind="stable").tolist():
        clients = plural(int((run.cluster_of == number).sum()), "client")
        found.append((number, f"{format_share(float(last[number]))} ({clients})"))
    return found


def unpaid(report: FederationReport) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the clients with most updates that were not used or did not come."""
    found = [(run, row) for run in report.runs for row in run.unpaid]
    found.sort(key=lambda pair: -pair[1].count)
    several = len(report.runs) > 1
    rows = [
        [
            row.client,
            row.check,
            *([f"{run.strategy}, seed {run.seed}"] if several else []),
            row.reason,
            str(row.count),
        ]
        for run, row in found[:_MOST_UNPAID]
    ]
    return ["client", "check", *(["run"] if several else []), "first reason", "times"], rows


def verdict(report: FederationReport) -> str:
    """Return which strategy is best at what, in a sentence or two."""
    target = format_share(report.target)
    times = {name: seconds_to_target(runs) for name, runs in report.by_strategy.items()}
    reached = {name: seconds for name, seconds in times.items() if seconds is not None}
    if not reached:
        return f"No strategy reached {target} within {significant(report.budget_s)} s."
    fastest = min(reached, key=lambda name: reached[name])
    sentence = f"{target} is reached soonest by {fastest}: after {reached[fastest]:,.0f} s."
    others = [name for name in reached if name != fastest]
    if others:
        second = min(others, key=lambda name: reached[name])
        ratio = reached[second] / reached[fastest]
        sentence += f" Next is {second}, which takes {ratio:.2f} times as long."
    return sentence
