"""The comparison of policies for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.report.fitting_table import FittingTable
from paceline.report.queue.figures import comparison, soonest, verdict, waiting
from paceline.report.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.report.queue.model import QueueReport


def render_queue(report: QueueReport) -> Group:
    """Return what ``paceline queue simulate`` shows: policies, the lower bound, waiting by size."""
    figures = [run.figures for run in report.runs]
    parts: list[RenderableType] = [Text(printable(report.summary), style="bold")]
    parts += [Text(printable(sentence), style="yellow") for sentence in report.cautions]
    heads, rows = comparison(figures)
    best = soonest(figures) if len(figures) > 1 else []
    bold = frozenset(index for index, row in enumerate(figures) if row.policy in best)
    parts += [Text(), _table(heads, rows, bold=bold, corner="policy")]
    parts += [Text(), Text(printable(verdict(figures)))]
    heads, rows = waiting(figures)
    parts += [
        Text(),
        Text("Waiting before the first start, by devices of the job"),
        _table(heads, rows, corner=heads[0]),
    ]
    return Group(*parts)


def _table(
    heads: list[str],
    rows: list[list[str]],
    *,
    bold: frozenset[int] = frozenset(),
    corner: str = "",
) -> FittingTable:
    return FittingTable(
        heads=tuple(map(printable, heads)),
        rows=tuple(tuple(map(printable, row)) for row in rows),
        bold=bold,
        corner=corner,
    )
