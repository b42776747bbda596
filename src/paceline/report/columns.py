"""Columns of a table, whatever draws it: which are left out, and which fit beside each other.

A terminal has a width. A table that does not fit it is turned or divided, so that no heading is cut
and no number wraps; only names may wrap, since scripts choose them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

GAP = 2  # spaces between two columns
NOTHING = ("-", "")  # cells that say nothing

Cell = TypeVar("Cell")


def without_empty(
    heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, names: int = 1
) -> tuple[list[str], list[list[Cell]]]:
    """Return heads and rows without the columns in which no row says anything.

    The first `names` columns stay. A table without rows keeps its columns.

    >>> without_empty(["rank", "modelled", "count"], [["0", "-", "7"], ["1", "-", "-"]])
    (['rank', 'count'], [['0', '7'], ['1', '-']])
    """
    kept = [
        column
        for column in range(len(heads))
        if column < names or not rows or any(row[column] not in NOTHING for row in rows)
    ]
    return [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]


def turned(
    corner: str, heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return the table with rows as columns; the first cell of each row becomes a heading.

    >>> turned("phase", ["share", "input", "forward"], [["rank 0", "5 %", "95 %"]])
    (['phase', 'rank 0'], [['input', '5 %'], ['forward', '95 %']])
    """
    columns = [[head, *(row[i] for row in rows)] for i, head in enumerate(heads) if i]
    return [corner, *(row[0] for row in rows)], columns


def width(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the characters that a table takes on a line."""
    return sum(widths(heads, rows)) + GAP * (len(heads) - 1)


def widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the characters that each column takes."""
    return [
        max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(heads)
    ]


def divided(
    heads: Sequence[str], rows: Sequence[Sequence[str]], limit: int, *, names: int = 1
) -> list[list[int]]:
    """Return which columns stand beside each other in tables that are at most `limit` wide.

    Each table begins with the first `names` columns; every other column is in one of the tables. A
    table takes one column even if that is too wide.

    >>> divided(["rank", "input", "forward"], [["rank 0", "10 %", "90 %"]], 13)
    [[0, 1], [0, 2]]
    """
    sizes = widths(heads, rows)
    fixed = sum(sizes[:names]) + GAP * (names - 1)
    tables: list[list[int]] = []
    room = 0
    for column in range(names, len(heads)):
        if not tables or sizes[column] + GAP > room:
            tables.append(list(range(names)))
            room = limit - fixed
        tables[-1].append(column)
        room -= sizes[column] + GAP
    return tables or [list(range(len(heads)))]
