"""Charts over the steps of a run: skew as a heat map, and step time as lines.

Both are bounded whatever the run's length: at most `COLUMNS` columns of steps and `ROWS` rows of
ranks are drawn. A column shows the worst of its steps and a row the worst of its ranks, so that
bounding never hides what was late. `page.js` zooms into both at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.report.page import svg
from paceline.report.page.chart import (
    FIELD,
    LABEL_X,
    ROWS,
    Chart,
    Values,
    blocks,
    to_zoom,
    vertical_scale,
    worst,
)
from paceline.report.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.blame import Straggler
    from paceline.trace.analysis.shifts import Shift

LEVELS = 8
LINES = 8  # more ranks are drawn as their range
_STEPS_PX = 160.0


def skew_scale_s(skew_s: np.ndarray, stragglers: Sequence[Straggler], floor_s: float) -> float:
    """Return the skew that gets the strongest colour.

    It is what all but 1 % of steps stay below or what stragglers typically reach, whichever is
    more: a single hiccup must not make everything else look pale. Nor must noise look like
    trouble in a run without any: hence `floor_s`, below which nobody would be blamed.
    """
    typical = [late.late_ms / 1e3 * 1.25 for late in stragglers]
    usual = float(np.percentile(skew_s, 99)) if skew_s.size else 0.0
    return max([usual, 2 * floor_s, *typical])


def skew_map(
    skew_s: np.ndarray, ranks: Sequence[int], stragglers: Sequence[Straggler], top_s: float
) -> Chart:
    """Return skew by rank and step as a heat map, stragglers' step ranges framed.

    Args:
        skew_s: shape (ranks, steps).
        ranks: numbers of the rows.
        stragglers: to frame.
        top_s: skew that gets the strongest colour.
    """
    steps = skew_s.shape[1]
    edges = blocks(len(ranks), ROWS)
    detailed = to_zoom(worst(skew_s, columns=steps))
    cells = worst(detailed)
    rows, columns = cells.shape
    row_px = 26.0 if rows <= 8 else max(7.0, 260.0 / rows)
    height = rows * row_px
    marks = [svg.rect(0, 0, FIELD, height, "heat-none")]
    level = np.rint(np.clip(cells / top_s, 0, 1) * LEVELS).astype(int)
    shapes = ((_cell_runs(level == i), f"heat-{i}") for i in range(1, LEVELS + 1))
    heat = [svg.path(shape, style) for shape, style in shapes if shape]
    marks.append(svg.group(heat, "heat", f"scale({FIELD / columns:.6g} {row_px:.6g})"))
    for late in stragglers[:ROWS]:
        row = int(np.searchsorted(edges, list(ranks).index(late.rank), "right")) - 1
        x = late.first_step / steps * FIELD
        width = (late.last_step + 1 - late.first_step) / steps * FIELD
        title = f"rank {late.rank}, steps {late.first_step} to {late.last_step}"
        marks.append(svg.rect(x, row * row_px, width, row_px, "straggler", title))
    names = [_row_name(ranks, edges, row) for row in range(rows)]
    every = max(1, -(-rows // 16))
    return Chart(
        name="skew",
        title="Skew by rank and step",
        description="A row per rank and a column per step: the stronger the colour, the later the "
        "rank. Frames mark the steps for which a rank is blamed.",
        unit="step",
        end=steps,
        height_px=height,
        marks=marks,
        labels=[
            svg.text(LABEL_X, (row + 0.5) * row_px + 4, f"rank {ranks[edges[row]]}", "label", "end")
            for row in range(0, rows, every)
        ],
        legend=_skew_legend(top_s, framed=bool(stragglers)),
        values=Values(seconds=detailed, rows=names, top_s=top_s, drawing="heat"),
    )


def _row_name(ranks: Sequence[int], edges: np.ndarray, row: int) -> str:
    first, last = ranks[edges[row]], ranks[edges[row + 1] - 1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _skew_legend(top_s: float, *, framed: bool) -> list[tuple[str, str]]:
    width = 14 * LEVELS
    strip = [svg.rect(0, 0, width, 12, "heat-none")]
    strip += [svg.rect(14 * (i - 1), 0, 14, 12, f"heat-{i}") for i in range(1, LEVELS + 1)]
    items = [(svg.swatch(strip, width), f"0 s to {format_seconds(top_s, 2)} late, or more")]
    if framed:
        frame = svg.swatch([svg.rect(1, 1, 18, 10, "straggler")], 20)
        items.append((frame, "steps for which a rank is blamed"))
    return items


def step_lines(step_s: np.ndarray, ranks: Sequence[int], shifts: Sequence[Shift] = ()) -> Chart:
    """Return step time over steps: a line per rank, or their range when there are many.

    The scale ends a little above what all but 2 % of the columns reach; longer steps are marked at
    its upper edge.

    Args:
        step_s: shape (ranks, steps).
        ranks: numbers of the rows.
        shifts: changes of all ranks, to mark.
    """
    few = len(ranks) <= LINES
    if few:
        lines, names = step_s, [f"rank {rank}" for rank in ranks]
    else:
        lines = np.stack([step_s.min(axis=0), np.median(step_s, axis=0), step_s.max(axis=0)])
        names = ["fastest rank", "median of the ranks", "slowest rank"]
    detailed = to_zoom(lines)
    cells = worst(detailed, rows=len(detailed))
    top_s = 1.2 * float(np.percentile(cells.max(axis=0), 98)) or 1.0
    x = ((np.arange(cells.shape[1]) + 0.5) / cells.shape[1] * FIELD).tolist()
    y = (_STEPS_PX * (1 - np.minimum(cells / top_s, 1))).tolist()
    drawn = [list(zip(x, row, strict=True)) for row in y]
    marks, labels = _time_scale(top_s)
    if few:
        shapes = [svg.polyline(points, f"line line-{i}") for i, points in enumerate(drawn)]
    else:
        shapes = [
            svg.polygon(drawn[2] + drawn[0][::-1], "band"),
            svg.polyline(drawn[1], "line line-0"),
        ]
    marks.append(svg.group(shapes, "lines"))
    for shift in shifts:
        at = shift.step / step_s.shape[1] * FIELD
        marks.append(svg.line(at, 0, at, _STEPS_PX, "shift"))
    beyond = np.flatnonzero(cells.max(axis=0) > top_s)
    over = [svg.arrow(svg.percent(x[i] / FIELD), 0, "beyond") for i in beyond.tolist()]
    longest_s = float(cells.max()) if beyond.size else None
    return Chart(
        name="step-time",
        title="Step time over steps",
        description="Step time of each rank over the steps of the run. The table below has the "
        "numbers.",
        unit="step",
        end=step_s.shape[1],
        height_px=_STEPS_PX,
        marks=marks,
        labels=labels,
        over=over,
        legend=_line_legend(names, few=few, longest_s=longest_s, shifts=shifts),
        values=Values(seconds=detailed, rows=names, top_s=top_s, drawing="lines"),
    )


def _time_scale(top_s: float) -> tuple[list[str], list[str]]:
    """Return the grid and the numbers of the vertical axis."""
    factor, unit = (1e3, "ms") if top_s < 1 else (1.0, "s")
    return vertical_scale(top_s * factor, 4, _STEPS_PX, f"step time, {unit}", "g")


def _line_legend(
    names: Sequence[str], *, few: bool, longest_s: float | None, shifts: Sequence[Shift]
) -> list[tuple[str, str]]:
    if few:
        samples = [
            svg.swatch([svg.line(0, 6, 28, 6, f"line line-{i}")], 28) for i in range(len(names))
        ]
        items = list(zip(samples, names, strict=True))
    else:
        items = [
            (svg.swatch([svg.line(0, 6, 28, 6, "line line-0")], 28), "median of the ranks"),
            (svg.swatch([svg.rect(0, 0, 14, 12, "band")]), "range of the ranks"),
        ]
    if shifts:
        items.append((svg.swatch([svg.line(7, 0, 7, 12, "shift")]), "all ranks changed"))
    if longest_s is not None:
        mark = svg.swatch([svg.arrow(7, 10, "beyond")])
        items.append((mark, f"longer than the scale, up to {format_seconds(longest_s)}"))
    return items


def _cell_runs(chosen: np.ndarray) -> str:
    """Return a path in cells: one rectangle for each run of chosen cells in a row."""
    paths = []
    for row, cells in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], cells.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            paths.append(f"M{begin} {row}h{end - begin}v1h{begin - end}z")
    return "".join(paths)
