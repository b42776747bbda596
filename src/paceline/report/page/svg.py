"""Pieces of SVG as text: pure functions that escape what they are given.

Colours come from CSS classes, so one drawing serves a light page, a dark page and paper. A place is
a number of the drawing's own units, or text in percent of its width, as `percent` returns it.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Point = tuple[float, float]
Place = float | str


def drawing(parts: Iterable[str], style: str, *, height: float, width: float | None = None) -> str:
    """Return an SVG whose units are pixels, for text that must not be stretched.

    It says nothing to those who listen: its labels repeat what a chart's table says.

    Args:
        parts: its content.
        style: class.
        height: pixels.
        width: pixels; None fills the column.
    """
    across = "100%" if width is None else _n(width)
    return (
        f'<svg class="{escape(style)}" width="{across}" height="{_n(height)}" aria-hidden="true">'
        f"{''.join(parts)}</svg>"
    )


def percent(share: float) -> str:
    """Return a place as a share of the drawing's width.

    >>> percent(0.125)
    '12.5%'
    """
    return f"{_n(100 * share)}%"


def rect(x: Place, y: float, width: Place, height: float, style: str, title: str = "") -> str:
    """Return a rectangle of class `style`; `title` shows when pointed at."""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    if not title:
        return f'<rect class="{escape(style)}" {place}/>'
    return f'<rect class="{escape(style)}" {place}><title>{escape(title)}</title></rect>'


def text(x: Place, y: float, content: str, style: str = "", anchor: str = "start") -> str:
    """Return one line of text; `anchor` is start, middle or end."""
    return (
        f'<text class="{escape(style)}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def turned_text(x: float, y: float, content: str, style: str = "") -> str:
    """Return a line of text that reads upwards, centred at its place."""
    place = f'transform="translate({_n(x)} {_n(y)}) rotate(-90)" text-anchor="middle"'
    return f'<text class="{escape(style)}" {place}>{escape(content)}</text>'


def line(x1: Place, y1: float, x2: Place, y2: float, style: str) -> str:
    """Return a straight line."""
    ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    return f'<line class="{escape(style)}" {ends}/>'


def polyline(points: Sequence[Point], style: str, title: str = "") -> str:
    """Return a line through `points`."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<polyline class="{escape(style)}" points="{_points(points)}">{inner}</polyline>'


def polygon(points: Sequence[Point], style: str) -> str:
    """Return a filled area with corners at `points`."""
    return f'<polygon class="{escape(style)}" points="{_points(points)}"/>'


def path(shape: str, style: str) -> str:
    """Return a path; `shape` is SVG's own language of moves, made by this program."""
    return f'<path class="{escape(style)}" d="{escape(shape)}"/>'


def group(parts: Iterable[str], style: str, transform: str = "") -> str:
    """Return `parts` as one element, moved or scaled by `transform`."""
    moved = f' transform="{escape(transform)}"' if transform else ""
    return f'<g class="{escape(style)}"{moved}>{"".join(parts)}</g>'


def arrow(x: Place, y: float, style: str) -> str:
    """Return a small triangle whose lower edge is at `y`; it keeps its shape wherever `x` is."""
    shape = f'<path class="{escape(style)}" d="M-4 0h8l-4 -7z"/>'
    return f'<svg x="{_n(x)}" y="{_n(y)}" overflow="visible">{shape}</svg>'


def swatch(parts: Iterable[str], width: float = 14, height: float = 12) -> str:
    """Return a sample of a mark, for a legend; the words beside it say what it stands for."""
    return (
        f'<svg class="swatch" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(parts)}</svg>"
    )


def ticks(top: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to at most `top`, about `count` of them.

    >>> ticks(23.0), ticks(0.7, 4)
    ([0.0, 5.0, 10.0, 15.0, 20.0], [0.0, 0.2, 0.4, 0.6])
    """
    if not top > 0 or not math.isfinite(top):
        return [0.0]
    rough = top / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    return [round(i * step, 12) for i in range(math.floor(top / step + 1e-9) + 1)]


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(value: Place) -> str:
    """Return a coordinate with at most two decimals, and no more text than that takes."""
    if isinstance(value, str):
        return value
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
