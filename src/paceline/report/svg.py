"""Pieces of SVG as text: pure functions that escape what they are given.

Colours come from CSS classes, so one drawing serves a light page, a dark page and paper.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Point = tuple[float, float]


def drawing(width: float, height: float, parts: Iterable[str], label: str) -> str:
    """Return a drawing that fills its column; `label` says what it shows to those who listen."""
    return (
        f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    """Return a rectangle of class `style`; `title` shows when pointed at."""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    if not title:
        return f'<rect class="{escape(style)}" {place}/>'
    return f'<rect class="{escape(style)}" {place}><title>{escape(title)}</title></rect>'


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> str:
    """Return one line of text; `anchor` is start, middle or end."""
    return (
        f'<text class="{escape(style)}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def turned_text(x: float, y: float, content: str, style: str = "") -> str:
    """Return a line of text that reads upwards, centred at its place."""
    place = f'transform="translate({_n(x)} {_n(y)}) rotate(-90)" text-anchor="middle"'
    return f'<text class="{escape(style)}" {place}>{escape(content)}</text>'


def line(a: Point, b: Point, style: str) -> str:
    """Return a straight line."""
    ends = f'x1="{_n(a[0])}" y1="{_n(a[1])}" x2="{_n(b[0])}" y2="{_n(b[1])}"'
    return f'<line class="{escape(style)}" {ends}/>'


def polyline(points: Sequence[Point], style: str, title: str = "") -> str:
    """Return a line through `points`."""
    places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<polyline class="{escape(style)}" points="{places}">{inner}</polyline>'


def polygon(points: Sequence[Point], style: str) -> str:
    """Return a filled area with corners at `points`."""
    places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    return f'<polygon class="{escape(style)}" points="{places}"/>'


def path(shape: str, style: str, transform: str = "") -> str:
    """Return a path; `shape` is SVG's own language of moves, made by this program."""
    moved = f' transform="{escape(transform)}"' if transform else ""
    return f'<path class="{escape(style)}"{moved} d="{escape(shape)}"/>'


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


def _n(value: float) -> str:
    """Return a coordinate with at most two decimals, and no more text than that takes."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
