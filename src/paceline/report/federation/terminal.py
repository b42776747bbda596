"""What ``paceline fed simulate`` shows on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.report.federation.figures import comparison, verdict
from paceline.report.fitting_table import FittingTable
from paceline.report.words import printable

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
    return Group(summary, Text(verdict(report)), Text(), lines)
