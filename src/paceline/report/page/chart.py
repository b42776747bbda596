"""The frame of a chart: legend, row labels, a plot that stretches, an axis, values to zoom into.

Every plot is `FIELD` units wide and stretches to its column; text does not stretch, and lies in
drawings of its own, placed in percent. So one chart fits a phone, a wide screen and paper without
a script, and to zoom is to change the view box of the plot and to draw the marks again from the
values (`page.js`).

    legend
    +--------+----------------------------+
    | labels | plot, and what is over it  |
    +--------+----------------------------+
             | axis                       |
             +----------------------------+
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from paceline.report.page import svg

FIELD = 1000.0  # width of a plot in its own units
COLUMNS = 400
ROWS = 64
# Values that a page keeps for zooming into one chart: two bytes each, 0.6 MB as text.
MAX_VALUES = 220_000
_LINE_STYLES = 12  # see page.css
_LABELS_PX, _AXIS_PX = 72.0, 40.0
_AXIS_NAMES = {
    "s": "seconds",
    "h": "hours",
    "%": "percent of jobs",
    "% of bytes": "percent of bytes",
}
_WHOLE = ("step", "ranks", "receiving rank")  # units of which there are no parts
# Values are kept as logarithms in two bytes: 1 ns to 10,000 s, within 0.03 %; 0 stands for 0.
_LEAST_S, _DECADES = 1e-9, 13


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Values:
    """What a chart over steps is drawn from.

    Attributes:
        seconds: shape (rows, columns); a column stands for one step or for the worst of several.
        rows: name of each row.
        top_s: seconds at the upper end of the scale.
        drawing: ``heat`` or ``lines``: how `page.js` draws them.
    """

    seconds: np.ndarray
    rows: Sequence[str]
    top_s: float
    drawing: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chart:
    """A chart, before it is text.

    Attributes:
        name: part of the ids of its elements, unique on the page.
        title: what it shows, in a few words.
        description: how to read it, for those who do not see it.
        unit: of its horizontal axis: step, ranks, s, h, % of jobs, or % of bytes.
        end: the axis goes from 0 to here.
        height_px: of the plot.
        marks: of the plot; x from 0 to `FIELD`, y in pixels.
        labels: of the rows, right-aligned at `LABEL_X`.
        over: text over the plot, x in percent.
        legend: items, each a sample of a mark and words.
        values: for zooming into; without them the marks are stretched.
    """

    name: str
    title: str
    description: str
    unit: str
    end: float
    height_px: float
    marks: Sequence[str]
    labels: Sequence[str]
    legend: Sequence[tuple[str, str]]
    over: Sequence[str] = ()
    values: Values | None = None


LABEL_X = _LABELS_PX - 10


def render(chart: Chart) -> str:
    """Return the chart as HTML."""
    title, description = f"{chart.name}-title", f"{chart.name}-description"
    data = {"unit": chart.unit, "end": f"{chart.end:.9g}", "height": f"{chart.height_px:g}"}
    if chart.values is not None:
        data |= _encoded(chart.values)
    attributes = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())
    plot = (
        f'<svg class="plot" role="img" aria-labelledby="{title} {description}" '
        f'viewBox="0 0 {FIELD:g} {chart.height_px:g}" preserveAspectRatio="none" width="100%" '
        f'height="{chart.height_px:g}"><title id="{title}">{escape(chart.title)}</title>'
        f'<desc id="{description}">{escape(chart.description)}</desc>'
        f'<g class="marks">{"".join(chart.marks)}</g></svg>'
    )
    return (
        f'<figure class="chart" id="{chart.name}" tabindex="0" role="group" '
        f'aria-labelledby="{title}"{attributes}>{legend(chart.legend)}<div class="frame">'
        f"{svg.drawing(chart.labels, 'labels', width=_LABELS_PX, height=chart.height_px)}"
        f'<div class="field">{plot}'
        f"{svg.drawing(chart.over, 'over', height=chart.height_px)}</div>"
        f"{_axis(chart)}</div></figure>"
    )


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return what each mark stands for: a sample of the mark, and words."""
    shown = "".join(f"<li>{sample}{escape(words)}</li>" for sample, words in items)
    return f'<ul class="legend">{shown}</ul>'


def numbered_line(number: int) -> str:
    """Return the style of one of several lines, from 0 on; from 12 on they repeat."""
    return f"line series-{number % _LINE_STYLES}"


def line_sample(style: str) -> str:
    """Return the mark of a line in a legend."""
    return svg.swatch([svg.line(0, 6, 28, 6, style)], 28)


def vertical_scale(
    top: float, numbers: int, height_px: float, name: str, style: str
) -> tuple[list[str], list[str]]:
    """Return the grid and the labels of a vertical axis.

    Args:
        top: the axis goes from 0 to here.
        numbers: about how many to write.
        height_px: of the plot.
        name: of the axis.
        style: format of the numbers.
    """
    grid, labels = [], []
    for at in svg.ticks(top, numbers):
        y = height_px * (1 - at / top)
        grid.append(svg.line(0, y, FIELD, y, "grid"))
        labels.append(svg.text(LABEL_X, y + 4, format(at, style), "tick", "end"))
    labels.append(svg.turned_text(12, height_px / 2, name, "axis-name"))
    return grid, labels


def blocks(count: int, limit: int) -> np.ndarray:
    """Return where each of at most `limit` nearly equal blocks of `count` things begins, and ends.

    >>> blocks(10, 4).tolist(), blocks(3, 4).tolist()
    ([0, 2, 5, 8, 10], [0, 1, 2, 3])
    """
    shown = max(1, min(count, limit))
    return np.linspace(0, count, shown + 1).round().astype(int)


def worst(values: np.ndarray, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Return `values` with at most `rows` x `columns` cells, each the maximum of its block."""
    if values.shape[0] > rows:
        values = np.maximum.reduceat(values, blocks(values.shape[0], rows)[:-1], axis=0)
    if values.shape[1] > columns:
        values = np.maximum.reduceat(values, blocks(values.shape[1], columns)[:-1], axis=1)
    return values


def to_zoom(seconds: np.ndarray) -> np.ndarray:
    """Return `seconds`, shape (rows, steps), with as many columns as a page may keep."""
    return worst(seconds, rows=len(seconds), columns=max(COLUMNS, MAX_VALUES // len(seconds)))


def encode(seconds: np.ndarray) -> np.ndarray:
    """Return `seconds` as logarithms of two bytes each; 0 and less are 0. `page.js` decodes them.

    >>> encode(np.array([0.0, 1e-9, 1e4])).tolist()
    [0, 1, 65535]
    """
    exponents = np.log10(np.maximum(seconds, _LEAST_S) / _LEAST_S) / _DECADES
    codes = np.minimum(1 + np.rint(exponents * 65534), 65535)
    return np.where(seconds > 0, codes, 0).astype("<u2")


def _encoded(values: Values) -> dict[str, str]:
    return {
        "drawing": values.drawing,
        "columns": str(values.seconds.shape[1]),
        "top": f"{values.top_s:.9g}",
        "rows": json.dumps(list(values.rows)),
        "values": base64.b64encode(encode(values.seconds).tobytes()).decode("ascii"),
    }


def _axis(chart: Chart) -> str:
    """Return the horizontal axis; every second number gives way on a narrow page."""
    parts = [svg.line(0, 0.5, "100%", 0.5, "rule")]
    numbers = [at for at in svg.ticks(chart.end, 7) if chart.unit not in _WHOLE or at == int(at)]
    for i, at in enumerate(numbers):
        place = svg.percent(at / (chart.end or 1.0))
        narrow = " spare" if i % 2 else ""
        parts.append(svg.line(place, 0, place, 4, f"rule{narrow}"))
        parts.append(svg.text(place, 17, f"{at:,.9g}", f"tick{narrow}", "middle"))
    name = _AXIS_NAMES.get(chart.unit, chart.unit)
    parts.append(svg.text("100%", 34, name, "axis-name", "end"))
    return svg.drawing(parts, "axis", height=_AXIS_PX)
