"""Cumulative curves: jobs done over time, and completion times by share of jobs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.report.page import svg
from paceline.report.page.chart import (
    COLUMNS,
    FIELD,
    LABEL_X,
    Chart,
    line_sample,
    numbered_line,
    vertical_scale,
)
from paceline.report.queue.figures import BOUND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.report.page.svg import Point
    from paceline.report.queue.model import PolicyRun

_HEIGHT_PX = 260.0
_DECADES = 6  # at most, below the longest completion time
_TIMES = ((1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"))
_HOURS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


def jobs_done(runs: Sequence[PolicyRun]) -> Chart:
    """Return the number of jobs done over time, and of a queue in which none waits."""
    end_s = max(float(run.ended_s.max()) for run in runs)
    most = max(len(run.ended_s) for run in runs)
    marks, labels = vertical_scale(most, 5, _HEIGHT_PX, "jobs done", ",.0f")
    for i, run in enumerate(runs):
        marks.append(svg.polyline(_done(run.ended_s, end_s, most), numbered_line(i)))
    best_s = runs[0].ended_s - runs[0].jct_s + runs[0].alone_s
    marks.append(svg.polyline(_done(best_s, end_s, most), "line bound"))
    return Chart(
        name="jobs-done",
        title="Jobs done over time",
        description="How many jobs were done by each moment, for each policy.",
        unit="h",
        end=end_s / 3600,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=_legend(runs),
    )


def completion_times(runs: Sequence[PolicyRun]) -> Chart:
    """Return completion times in ascending order, over the share of jobs; logarithmic."""
    longest_s = max(float(run.jct_s.max()) for run in runs)
    shortest_s = min(float(values.min()) for run in runs for values in (run.jct_s, run.alone_s))
    top = math.log10(longest_s * 1.05)
    low = max(math.log10(max(shortest_s, 1e-3)) - 0.05, top - _DECADES)
    marks, labels = _log_scale(low, top)
    for i, run in enumerate(runs):
        marks.append(svg.polyline(_quantiles(run.jct_s, low, top), numbered_line(i)))
    marks.append(svg.polyline(_quantiles(runs[0].alone_s, low, top), "line bound"))
    return Chart(
        name="completion-times",
        title="Completion times by share of jobs",
        description="The completion time that a share of the jobs did not exceed, for each policy.",
        unit="%",
        end=100.0,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=_legend(runs),
    )


def _legend(runs: Sequence[PolicyRun]) -> list[tuple[str, str]]:
    names = [(numbered_line(i), run.figures.policy) for i, run in enumerate(runs)]
    return [
        (line_sample(style), name)
        for style, name in [*names, ("line bound", f"{BOUND}: every job alone, at once")]
    ]


def _done(ended_s: np.ndarray, end_s: float, most: int) -> list[Point]:
    times_s = np.linspace(0, end_s, COLUMNS + 1)
    counts = np.searchsorted(np.sort(ended_s), times_s, side="right")
    x = times_s / (end_s or 1.0) * FIELD
    return list(zip(x.tolist(), (_HEIGHT_PX * (1 - counts / most)).tolist(), strict=True))


def _quantiles(values_s: np.ndarray, low: float, top: float) -> list[Point]:
    shares = np.linspace(0, 1, min(COLUMNS, 4 * len(values_s)) + 1)
    logs = np.log10(np.maximum(np.quantile(values_s, shares), 10**low))
    y = _HEIGHT_PX * (1 - (logs - low) / (top - low))
    return list(zip((shares * FIELD).tolist(), y.tolist(), strict=True))


def _log_scale(low: float, top: float) -> tuple[list[str], list[str]]:
    marks, labels = [], []
    times = [*_TIMES, *((3600.0 * hours, f"{hours:,} h") for hours in _HOURS)]
    for seconds, words in times:
        at = math.log10(seconds)
        if low <= at <= top:
            y = _HEIGHT_PX * (1 - (at - low) / (top - low))
            marks.append(svg.line(0, y, FIELD, y, "grid"))
            labels.append(svg.text(LABEL_X, y + 4, words, "tick", "end"))
    return marks, labels
