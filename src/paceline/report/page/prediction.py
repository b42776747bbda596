"""A typical step, by phase; beside its prediction if the run was predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.compare import shown_cells, shown_phases
from paceline.report.page import svg
from paceline.report.page.chart import legend
from paceline.report.page.markup import Html, details, section, table
from paceline.report.units import format_seconds, format_share, plural, seconds_that_add_up
from paceline.report.words import phase_label

if TYPE_CHECKING:
    from paceline.core.estimate import Estimate
    from paceline.report.compare import Comparison
    from paceline.report.model import Report

_BAR_PX = 180.0


def typical_step(report: Report) -> str:
    """Return a typical step by phase, and what was predicted of it."""
    comparison = report.comparison
    if not comparison.measured_step_s:
        return ""
    of = (
        f"the {comparison.undisturbed_steps:,} of {plural(comparison.steps, 'step')} after the "
        "warm-up in which no rank was late"
        if comparison.undisturbed_steps
        else f"{plural(comparison.steps, 'step')}, in each of which a rank was late,"
    )
    note = (
        f"The mean over ranks and over typical steps: of {of} the half closest to the median. The "
        "total is the median step of the slowest rank."
    )
    if comparison.not_compared:
        note += f" The prediction is not shown beside it, since {comparison.not_compared}."
    if comparison.predicted_step_s is None:
        return section("A typical step", note, _measured(comparison))
    note += " Ratio is predicted over measured."
    limit = _limit(report.estimate) if report.estimate is not None else ""
    return section("Prediction beside measurement", note, _compared(comparison), limit)


def _measured(comparison: Comparison) -> str:
    phases = shown_phases(comparison)
    seconds = [phase.measured_s for phase in phases]
    *shown, total = seconds_that_add_up(seconds)
    total_s = max(sum(seconds), 1e-12)
    rows = [
        [phase_label(phase.name), text, format_share(phase.measured_s / total_s)]
        for phase, text in zip(phases, shown, strict=True)
    ]
    rows.append(["step", total, ""])
    heads = ["phase", "seconds", "of the step"]
    return f'<div class="narrow">{table(heads, rows, total=True)}</div>'


def _compared(comparison: Comparison) -> str:
    phases = shown_phases(comparison)
    *cells, step = shown_cells(comparison)
    top_s = max(max(phase.predicted_s or 0.0, phase.measured_s) for phase in phases)
    rows: list[list[object]] = [
        [
            phase_label(phase.name),
            Html(_pair_bar(phase.predicted_s or 0.0, phase.measured_s, top_s)),
            *shown,
        ]
        for phase, shown in zip(phases, cells, strict=True)
    ]
    step_s = comparison.predicted_step_s or 0.0
    ratio = f"{step_s / comparison.measured_step_s:.2f}" if comparison.measured_step_s else "-"
    rows.append(["step", "", *step, ratio])
    items = [
        (svg.swatch([svg.rect(0, 2, 14, 8, style)]), style) for style in ("predicted", "measured")
    ]
    heads = ["phase", "", "predicted", "measured", "ratio"]
    return legend(items) + table(heads, rows, names=2, total=True)


def _pair_bar(predicted_s: float, measured_s: float, top_s: float) -> str:
    """Return two small bars, the prediction above the measurement, on a scale up to `top_s`."""
    scale = _BAR_PX / max(top_s, 1e-12)
    parts = [
        svg.rect(0, 0, predicted_s * scale, 7, "predicted"),
        svg.rect(0, 9, measured_s * scale, 7, "measured"),
    ]
    return svg.swatch(parts, _BAR_PX, 16)


def _limit(estimate: Estimate) -> str:
    rows = [
        [name, format_share(share)]
        for name, share in sorted(estimate.shares.items(), key=lambda item: -item[1])
    ]
    interval = f"{format_seconds(estimate.low_s)} to {format_seconds(estimate.high_s)}"
    summary = f"Expected step time {interval}; predicted to be limited by {estimate.limit}"
    return details(summary, table(["resource", "share of the predicted step"], rows))
