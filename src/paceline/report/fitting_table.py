"""A table of a terminal that never cuts a heading and never wraps a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from paceline.report.columns import (
    GAP,
    divided,
    fitted,
    total_width,
    turned,
    widths,
    without_empty,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingTable:
    """A table that fits the console on which it is printed.

    Too wide a table is turned, if it may be, and divided otherwise. Columns in which no row says
    anything are left out.

    Attributes:
        heads: of the columns.
        rows: of cells, printable text.
        names: how many columns, from the left, hold words; they are set to the left.
        corner: first heading of the turned table; empty if it must not be turned.
        bold: numbers of the rows that stand out.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    corner: str = ""
    bold: frozenset[int] = frozenset()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the table's lines."""
        limit = options.max_width
        heads, rows = without_empty(self.heads, self.rows, names=self.names)
        sizes = fitted(widths(heads, rows), limit, names=self.names)
        bold = self.bold
        if self.corner and total_width(sizes) > limit:
            other = turned(self.corner, heads, rows)
            other_sizes = widths(*other)
            if total_width(other_sizes) <= limit:
                (heads, rows), sizes, bold = other, other_sizes, frozenset()
        rule = "-" if options.ascii_only else "─"
        for i, columns in enumerate(divided(sizes, limit, names=self.names)):
            if i:
                yield Text()
            part = [sizes[column] for column in columns]
            yield from self._lines([heads[column] for column in columns], part, style="bold")
            yield Text(rule * total_width(part), style="dim")
            for number, row in enumerate(rows):
                style = "bold" if number in bold else ""
                yield from self._lines([row[column] for column in columns], part, style=style)

    def _lines(self, cells: Sequence[str], sizes: Sequence[int], *, style: str) -> Iterator[Text]:
        parts = [
            wrapped(cell, size) if column < self.names else [cell]
            for column, (cell, size) in enumerate(zip(cells, sizes, strict=True))
        ]
        for i in range(max(len(lines) for lines in parts)):
            shown = []
            for column, (lines, size) in enumerate(zip(parts, sizes, strict=True)):
                cell = lines[i] if i < len(lines) else ""
                room = " " * (size - cell_len(cell))
                shown.append(cell + room if column < self.names else room + cell)
            yield Text((" " * GAP).join(shown).rstrip(), style=style, no_wrap=True, end="\n")
