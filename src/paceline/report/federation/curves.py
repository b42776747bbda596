"""Accuracy over simulated time, and how evenly clients took part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.report.federation.figures import clusters_of
from paceline.report.page import svg
from paceline.report.page.chart import FIELD, Chart, line_sample, numbered_line, vertical_scale

if TYPE_CHECKING:
    from paceline.report.federation.model import FederationReport, FederationRun
    from paceline.report.page.svg import Point

_HEIGHT_PX = 260.0


def accuracy_over_time(report: FederationReport) -> Chart:
    """Return the accuracy of the global model over simulated time; a line for each seed."""
    end_s = max((float(run.at_s[-1]) for run in report.runs if run.at_s.size), default=1.0)
    marks, labels = vertical_scale(1.0, 5, _HEIGHT_PX, "accuracy", ".1f")
    y = _HEIGHT_PX * (1 - report.target)
    marks.append(svg.line(0, y, FIELD, y, "line bound"))
    for index, runs in enumerate(report.by_strategy.values()):
        for run in runs:
            x = run.at_s / end_s * FIELD
            marks.append(svg.polyline(_points(x, run.accuracy), numbered_line(index)))
    return Chart(
        name="accuracy",
        title="Accuracy over simulated time",
        description="The accuracy of the global model at each evaluation, for each strategy.",
        unit="h",
        end=end_s / 3600,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=[*_legend(report), (line_sample("line bound"), "target")],
    )


def accuracy_by_class(run: FederationRun) -> Chart:
    """Return the accuracy of the global model on each class over simulated time, of one run."""
    lines = {f"class {n}": run.by_class[:, n] for n in range(run.by_class.shape[1])}
    return _over_time(run, "classes", "Accuracy on each class", lines)


def accuracy_by_group(run: FederationRun) -> Chart:
    """Return the accuracy of the global model for each group of clients, of one run."""
    lines = {f"{name} clients": values for name, values in run.by_group.items()}
    return _over_time(run, "groups", "Accuracy for groups of clients", lines)


def accuracy_by_cluster(run: FederationRun) -> Chart:
    """Return the accuracy for each cluster of clients over simulated time, of one run."""
    lines = {
        f"cluster {place}": run.by_cluster[:, number]
        for place, (number, _) in enumerate(clusters_of(run), 1)
    }
    return _over_time(run, "clusters", "Accuracy for clusters of clients", lines)


def _over_time(run: FederationRun, name: str, title: str, lines: dict[str, np.ndarray]) -> Chart:
    end_s = float(run.at_s[-1])
    marks, labels = vertical_scale(1.0, 5, _HEIGHT_PX, "accuracy", ".1f")
    for index, values in enumerate(lines.values()):
        known = np.isfinite(values)
        points = _points(run.at_s[known] / end_s * FIELD, values[known])
        marks.append(svg.polyline(points, numbered_line(index)))
    return Chart(
        name=name,
        title=title,
        description=f"{title} at each evaluation, of {run.strategy} with seed {run.seed}.",
        unit="h",
        end=end_s / 3600,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=[(line_sample(numbered_line(n)), words) for n, words in enumerate(lines)],
    )


def participation(report: FederationReport) -> Chart:
    """Return the used updates of each client, in ascending order; of the first seed."""
    first = {name: runs[0].returned for name, runs in report.by_strategy.items()}
    top = max(1.0, *(float(np.max(counts)) for counts in first.values()))
    marks, labels = vertical_scale(top, 5, _HEIGHT_PX, "used updates", ",.0f")
    for index, counts in enumerate(first.values()):
        x = np.linspace(0, FIELD, counts.size) if counts.size > 1 else np.array([0.0])
        marks.append(svg.polyline(_points(x, np.sort(counts) / top), numbered_line(index)))
    return Chart(
        name="participation",
        title="Used updates by client",
        description="How many updates of a client were used, for each share of the clients.",
        unit="percent of clients",
        end=100.0,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=_legend(report),
    )


def _points(x: np.ndarray, share: np.ndarray) -> list[Point]:
    return list(zip(x.tolist(), (_HEIGHT_PX * (1 - share)).tolist(), strict=True))


def _legend(report: FederationReport) -> list[tuple[str, str]]:
    return [
        (line_sample(numbered_line(index)), name) for index, name in enumerate(report.by_strategy)
    ]
