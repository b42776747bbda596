"""A profile for a terminal: advice, cautions, the scaling of each combination, single changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.report.characterization import tables
from paceline.report.characterization.words import advice, cautions
from paceline.report.fitting_table import FittingTable
from paceline.report.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.core.scaling_profile import ScalingProfile
    from paceline.report.characterization.tables import TableRows


def render_profile(profile: ScalingProfile) -> Group:
    """Return what ``paceline characterize`` shows at its end."""
    parts: list[RenderableType] = [
        Text(printable(sentence), style="yellow") for sentence in cautions(profile)
    ]
    first, *others = advice(profile)
    parts.append(Text(printable(first), style="bold"))
    parts += [Text(printable(f"- {sentence}")) for sentence in others]
    parts += [Text(), _table(tables.scaling(profile), names=2)]
    changes = tables.changes(profile)
    if changes[1]:
        parts += [Text(), Text("One change at a time"), _table(changes, names=3)]
    parts += [Text(printable(f"failed: {cell.name}, {cell.ranks}: {cell.why}"), style="red")
              for cell in profile.failed]  # fmt: skip
    return Group(*parts)


def _table(rows: TableRows, names: int = 1) -> FittingTable:
    heads, lines = rows
    return FittingTable(
        heads=tuple(map(printable, heads)),
        rows=tuple(tuple(map(printable, line)) for line in lines),
        names=names,
    )
