"""HTML as text, with one rule: what is not `Html` already is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from paceline.report.columns import without_empty

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_LONG = 40  # letters: a longer name gets a wide column, rather than many short lines


class Html(str):
    """Markup that this program made; every other string is somebody's text."""

    __slots__ = ()


def markup(content: object) -> str:
    """Return `content` as markup: escaped, unless it is `Html`."""
    return content if isinstance(content, Html) else escape(str(content))


def section(title: str, note: object, *parts: str) -> str:
    """Return a section with its heading and a line on how to read it."""
    note_html = f'<p class="note">{markup(note)}</p>' if note else ""
    return f"<section><h2>{markup(title)}</h2>{note_html}{''.join(parts)}</section>"


def header(title: str, cautions: Iterable[str], verdict: str, state: object) -> str:
    """Return the top of a page: what it shows, what must be known first, and what came of it."""
    items = "".join(f"<li>{markup(sentence)}</li>" for sentence in cautions)
    warning = f'<ul class="cautions" role="note">{items}</ul>' if items else ""
    return (
        f'<header><h1>{markup(title)}</h1>{warning}<p class="verdict">{markup(verdict)}</p>'
        f'<p class="state">{markup(state)}</p></header>'
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, names: int = 1, total: bool = False
) -> str:
    """Return a table; columns after the first `names` hold numbers and are set to the right.

    Columns of numbers in which no row has a value are left out.

    Args:
        heads: of the columns.
        rows: of cells.
        names: how many columns, from the left, hold words.
        total: whether the last row is the sum of the others.
    """
    heads, lines = without_empty(heads, list(rows), names=names)
    styles = ["name" if i < names else "n" for i in range(len(heads))]
    head = "".join(
        f'<th scope="col" class="{style}">{markup(head)}</th>'
        for style, head in zip(styles, heads, strict=True)
    )
    last = len(lines) - 1
    body = "".join(
        f"<tr{' class=total' if total and i == last else ''}>{_cells(styles, row)}</tr>"
        for i, row in enumerate(lines)
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(styles: Sequence[str], row: Sequence[object]) -> str:
    cells = []
    for style, cell in zip(styles, row, strict=True):
        is_long = style == "name" and not isinstance(cell, Html) and len(str(cell)) > _LONG
        cells.append(f'<td class="{style}{" long" * is_long}">{markup(cell)}</td>')
    return "".join(cells)


def details(summary: str, body: str) -> str:
    """Return `body` folded away under `summary`."""
    return f"<details><summary>{markup(summary)}</summary>{body}</details>"


def figures(items: Iterable[tuple[str, str, str]]) -> str:
    """Return key figures: name, value, and what to know of it."""
    boxes = "".join(
        f"<div><dt>{markup(name)}</dt><dd>{markup(value)}<small>{markup(note)}</small></dd></div>"
        for name, value, note in items
    )
    return f'<dl class="figures">{boxes}</dl>'
