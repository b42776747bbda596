"""Who was late: skew by rank and step, and the stragglers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.report.delays import brief_steps
from paceline.report.page.by_step import skew_map, skew_scale_s
from paceline.report.page.chart import COLUMNS, ROWS, render
from paceline.report.page.markup import details, section, table
from paceline.report.page.times import MAX_ROWS
from paceline.report.units import format_share, plural, significant
from paceline.trace.analysis.blame import BlameRules

if TYPE_CHECKING:
    from paceline.report.model import Report


def skew_by_step(report: Report) -> str:
    """Return how late each rank was in each step."""
    if report.world_size < 2 or not report.steps:
        return ""
    rules = BlameRules()
    floor_s = max(rules.min_late_s, rules.min_late_share * report.comparison.measured_step_s)
    top_s = skew_scale_s(report.skew_s, report.stragglers, floor_s)
    ranks = [rank.rank for rank in report.rank_phases]
    skew_ms = report.skew_s * 1e3
    order = np.argsort(-skew_ms.sum(axis=1), kind="stable")[:MAX_ROWS]
    rows = [
        [
            f"rank {ranks[i]}",
            f"{significant(float(np.median(skew_ms[i])))} ms",
            f"{significant(float(np.percentile(skew_ms[i], 95)))} ms",
            f"{significant(float(skew_ms[i].max()))} ms",
            f"{int(skew_ms[i].argmax()):,}",
        ]
        for i in order.tolist()
    ]
    heads = ["rank", "median", "95th percentile", "largest", "in step"]
    return section(
        "Skew",
        _note(report),
        render(skew_map(report.skew_s, ranks, report.stragglers, top_s)),
        _stragglers(report),
        details("Numbers", table(heads, rows)),
    )


def _note(report: Report) -> str:
    ranks = len(report.rank_phases)
    note = (
        "How much longer than the fastest rank each rank took from one synchronising collective of "
        "the step to the next; time spent waiting for other ranks is not counted. "
    )
    if report.steps > COLUMNS:
        each = -(-report.steps // COLUMNS)
        note += f"A column shows the worst of up to {plural(each, 'step')}. "
    if ranks > ROWS:
        note += f"A row shows the worst of up to {plural(-(-ranks // ROWS), 'rank')}. "
    return note


def _stragglers(report: Report) -> str:
    if not report.stragglers:
        return ""
    rows = [
        [
            f"rank {late.rank}",
            late.cause.replace("_", " "),
            late.shape,
            brief_steps(late).removeprefix("in "),
            f"{significant(late.late_ms)} ms",
            format_share(late.late_share),
            format_share(late.others_wait),
            format_share(late.confidence) if late.confidence else "-",
        ]
        for late in report.stragglers[:MAX_ROWS]
    ]
    heads = ["straggler", "cause", "shape", "when", "typical skew"]
    heads += ["late steps", "others wait", "confidence"]
    return table(heads, rows, names=4)
