"""Columns of a table, whatever draws it: which are left out, and which fit beside each other.

A terminal has a width. A table that does not fit it is turned or divided, so that no heading is cut
and no number wraps; only names wrap, since scripts choose them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rich.cells import cell_len, chop_cells

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
    """Return the table with its rows as columns: the first cell of each row becomes a heading.

    >>> turned("phase", ["share", "input", "forward"], [["rank 0", "5 %", "95 %"]])
    (['phase', 'rank 0'], [['input', '5 %'], ['forward', '95 %']])
    """
    columns = [[head, *(row[i] for row in rows)] for i, head in enumerate(heads) if i]
    return [corner, *(row[0] for row in rows)], columns


def widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return how many columns of a terminal each column of the table takes."""
    return [
        max([cell_len(head), *(cell_len(row[i]) for row in rows)]) for i, head in enumerate(heads)
    ]


def total_width(sizes: Sequence[int]) -> int:
    """Return how many columns of a terminal a table takes.

    >>> total_width([6, 10])
    18
    """
    return sum(sizes) + GAP * (len(sizes) - 1)


def fitted(sizes: Sequence[int], limit: int, *, names: int) -> list[int]:
    """Return the sizes of columns, those of names made smaller until the widest number fits, too.

    >>> fitted([40, 90, 10], 80, names=2), fitted([6, 10, 10], 80, names=1)
    ([33, 33, 10], [6, 10, 10])
    """
    fixed = max(sizes[names:], default=0)
    room = limit - GAP * names - fixed
    result = list(sizes)
    by_size = sorted(range(names), key=lambda column: sizes[column])
    for i, column in enumerate(by_size):
        share = max(1, room // (names - i))
        result[column] = min(sizes[column], share)
        room -= result[column]
    return result


def divided(sizes: Sequence[int], limit: int, *, names: int) -> list[list[int]]:
    """Return which columns stand beside each other in tables that are at most `limit` wide.

    Each table begins with the first `names` columns; every other column is in one of the tables. A
    table takes one column even if that is too wide. There are as few tables as possible, and the
    widest of them is as narrow as that allows.

    >>> divided([6, 5, 7], 15, names=1), divided([1, 1, 1, 1, 1], 10, names=1)
    ([[0, 1], [0, 2]], [[0, 1, 2], [0, 3, 4]])
    """
    tables = _filled(sizes, limit, names)
    for narrower in range(limit - 1, 0, -1):
        other = _filled(sizes, narrower, names)
        if len(other) > len(tables):
            break
        tables = other
    return tables


def _filled(sizes: Sequence[int], limit: int, names: int) -> list[list[int]]:
    """Return the columns of tables that are filled one after the other."""
    fixed = total_width(sizes[:names])
    tables: list[list[int]] = []
    room = 0
    for column in range(names, len(sizes)):
        if not tables or sizes[column] + GAP > room:
            tables.append(list(range(names)))
            room = limit - fixed
        tables[-1].append(column)
        room -= sizes[column] + GAP
    return tables or [list(range(len(sizes)))]


def wrapped(cell: str, size: int) -> list[str]:
    """Return a cell as lines of at most `size` columns; words are divided only if they must be.

    >>> wrapped("all_reduce of a group", 12), wrapped("abcdef", 4)
    (['all_reduce', 'of a group'], ['abcd', 'ef'])
    """
    lines = [""]
    for word in cell.split(" "):
        # What has no width, such as a combining letter alone, is dropped by `chop_cells`.
        parts = chop_cells(word, size) if cell_len(word) > size else [word]
        for i, part in enumerate(parts):
            joined = f"{lines[-1]} {part}" if lines[-1] and not i else part
            if i or cell_len(joined) > size or not lines[-1]:
                lines = [*lines, part] if lines[-1] else [*lines[:-1], part]
            else:
                lines[-1] = joined
    return lines
