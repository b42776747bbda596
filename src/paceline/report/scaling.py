"""A scaling study for a terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.report.fitting_table import FittingTable
from paceline.report.plan_search import plan_in_words
from paceline.report.units import format_seconds, format_share
from paceline.report.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.perf.planner.scaling import ScalingPoint, ScalingStudy


def render_scaling(study: ScalingStudy) -> Group:
    """Return what ``paceline plan --scaling`` shows."""
    bold = frozenset(k for k, point in enumerate(study.points) if point.nodes == study.knee)
    lines: list[RenderableType] = [
        Text(
            f"{printable(study.workload)} on {printable(study.machine)}, {study.batch:,} samples "
            f"per step at every size; {knee_in_words(study)}",
            style="bold",
        ),
        Text(),
        FittingTable(
            heads=("nodes", "step", "90 %", "efficiency", "node-h per 1M samples", "training"),
            rows=tuple(_row(study, point) for point in study.points),
            bold=bold,
        ),
        Text(),
        FittingTable(
            heads=("nodes", "the fastest plan", "limited by"),
            rows=tuple(
                (f"{point.nodes:,}", plan_in_words(point.plan), printable(point.limit))
                for point in study.points
            ),
            names=3,
            bold=bold,
        ),
        Text(),
    ]
    for nodes, why in ((study.too_small, "no plan fits"),
                       (study.indivisible, "the batch cannot be divided")):  # fmt: skip
        if nodes:
            lines.append(Text(f"left out, {why}: {', '.join(map(str, nodes))} nodes"))
    return Group(*lines)


def knee_in_words(study: ScalingStudy) -> str:
    """Return where the knee is, or that it lies beyond the sizes of the study."""
    if study.knee == study.points[-1].nodes:
        return f"no knee up to {study.knee:,} nodes"
    return f"knee: {study.knee:,} nodes"


def _row(study: ScalingStudy, point: ScalingPoint) -> tuple[str, ...]:
    return (
        f"{point.nodes:,}",
        format_seconds(point.step_s),
        f"{format_seconds(point.low_s)} to {format_seconds(point.high_s)}",
        format_share(point.efficiency),
        f"{point.node_hours:,.1f}",
        f"{study.training_s(point) / 3600:,.1f} h" if study.samples else "",
    )


def scaling_csv(study: ScalingStudy) -> str:
    """Return the study as CSV, a row for each size; seconds, samples per second, node-hours."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ["nodes", "devices", "step_s", "low_s", "high_s", "samples_per_s", "efficiency",
            "node_hours_per_million_samples", "limit", "plan"]  # fmt: skip
    writer.writerow([*head, "training_s"] if study.samples else head)
    for point in study.points:
        row = [point.nodes, point.devices, f"{point.step_s:.6g}", f"{point.low_s:.6g}",
               f"{point.high_s:.6g}", f"{point.samples_per_s:.6g}", f"{point.efficiency:.4f}",
               f"{point.node_hours:.6g}", point.limit, plan_in_words(point.plan)]  # fmt: skip
        writer.writerow([*row, f"{study.training_s(point):.6g}"] if study.samples else row)
    return out.getvalue()
