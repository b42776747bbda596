"""Where the time of each rank went: by phase, by step, and by name of the script's own work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.report.page.by_rank import time_bars
from paceline.report.page.by_step import LINES, step_lines
from paceline.report.page.chart import COLUMNS, render
from paceline.report.page.markup import details, section, table
from paceline.report.units import (
    format_seconds,
    format_share,
    plural,
    seconds_that_add_up,
    shown_parts,
)
from paceline.report.words import STEP_RULES, phase_label
from paceline.trace.efficiency.strips import shown_ranks
from paceline.trace.merge.steps import StepRule

if TYPE_CHECKING:
    from paceline.report.model import Report
    from paceline.trace.analysis.phases import RankPhases

MAX_ROWS = 128


def by_phase(report: Report) -> str:
    """Return where each rank's time went."""
    if not report.steps:
        return ""
    shown = _shown_ranks(report)
    times = [rank.breakdown() for rank in shown]
    present = shown_parts(PHASES, [dict(spent.items()) for spent in times])
    rows = []
    for rank, spent in zip(shown, times, strict=True):
        *parts, total = seconds_that_add_up([getattr(spent, name) for name in present])
        cells = [
            f"{part} ({format_share(getattr(spent, name) / max(spent.total_s, 1e-12))})"
            for part, name in zip(parts, present, strict=True)
        ]
        rows.append([f"rank {rank.rank}", *cells, total])
    note = (
        "The training loop of each rank, from its first phase to the end of its last step. Phases "
        "exclude each other. Waiting is time inside a collective before the last rank entered, "
        "communication is the time after that; communication that overlaps with computation is in "
        "neither."
    )
    if len(shown) < len(report.rank_phases):
        note += (
            f" {len(shown)} of {len(report.rank_phases)} ranks are shown, the late ones among them."
        )
    heads = ["rank", *(phase_label(name) for name in present), "total"]
    return section(
        "Time by phase",
        note,
        render(time_bars([rank.rank for rank in shown], times)),
        details("Numbers", table(heads, rows)),
    )


def _shown_ranks(report: Report) -> list[RankPhases]:
    ranks = [rank.rank for rank in report.rank_phases]
    return [report.rank_phases[i] for i in shown_ranks(ranks, report.stragglers)]


def by_step(report: Report) -> str:
    """Return how step time went over the run."""
    if not report.steps:
        return ""
    times = np.array([rank.train_s[: report.steps] for rank in report.rank_phases])
    ranks = [rank.rank for rank in report.rank_phases]
    note = STEP_RULES[StepRule(report.trace.step_rule)]
    if len(ranks) > LINES:
        note += " The line is the median of the ranks, the band their range."
    if report.steps > COLUMNS:
        note += " Each point is the longest of its steps."
    rows = [
        [
            f"rank {rank}",
            *(format_seconds(float(v)) for v in np.percentile(times[i], [0, 50, 95, 100])),
        ]
        for i, rank in enumerate(ranks[:MAX_ROWS])
    ]
    numbers = details("Numbers", table(["rank", "fastest", "median", "95 %", "slowest"], rows))
    return section("Step time", note, render(step_lines(times, ranks, report.shifts)), numbers)


def host_work(report: Report) -> str:
    """Return the script's own named work, the longest first."""
    if not report.host_work:
        return ""
    loop_s = max(report.total.total_s, 1e-12)
    rows = [
        [
            time.words,
            format_seconds(time.measured_s),
            format_share(time.measured_s / loop_s),
            plural(time.samples, "sample") if time.samples else "timed",
        ]
        for time in report.host_work[:MAX_ROWS]
    ]
    note = (
        "What the script does between phases, by name; the mean over ranks. It is the phase host "
        "of the chart of time by phase."
    )
    heads = ["work", "seconds", "of the loop", "measured by"]
    return section("Host work", note, table(heads, rows))
