"""What ``paceline fed simulate`` shows on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.report.federation.figures import clusters_of, comparison, verdict
from paceline.report.fitting_table import FittingTable
from paceline.report.words import printable

_MOST_UNPAID = 5

if TYPE_CHECKING:
    from paceline.report.federation.model import FederationReport


def render_federation(report: FederationReport) -> Group:
    """Return the verdict and the table of strategies."""
    heads, rows = comparison(report)
    lines = FittingTable(
        heads=tuple(map(printable, heads)),
        rows=tuple(tuple(map(printable, row)) for row in rows),
        bold=frozenset(),
        corner="strategy",
    )
    summary = Text(printable(report.summary), style="bold")
    return Group(summary, Text(verdict(report)), Text(), lines, *_notes(report))


def _notes(report: FederationReport) -> list[Text]:
    """Return alarms, what clients were not paid for, and accuracy for clusters of clients."""
    several = len(report.runs) > 1
    notes = [
        f"Alarm{f' of {run.strategy}, seed {run.seed}' if several else ''}: {alarm}."
        for run in report.runs
        for alarm in run.alarms
    ]
    rows = [] if several else report.runs[0].unpaid
    notes += [
        f"Unpaid: client {row.client}, {row.count}x ({row.check}: {row.reason})."
        for row in rows[:_MOST_UNPAID]
    ]
    if len(rows) > _MOST_UNPAID:
        notes.append(f"Unpaid: {len(rows) - _MOST_UNPAID} more rows are on the page and in --json.")
    if not several and report.runs[0].by_cluster.size:
        clusters = ", ".join(text for _, text in clusters_of(report.runs[0]))
        notes.append(f"Clusters of clients whose updates are alike: {clusters}.")
    return [Text(), *(Text(printable(note)) for note in notes)] if notes else []
