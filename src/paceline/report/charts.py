"""The report's drawings: numbers in, SVG out. No chart knows of files or HTML.

Every chart is bounded whatever the run's length: at most `COLUMNS` columns of steps and `ROWS` rows
of ranks. A column shows the worst of its steps and a row the worst of its ranks, so that bounding
never hides what was late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.report import svg
from paceline.report.units import format_seconds, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.breakdown import Breakdown
    from paceline.trace.blame import Straggler

COLUMNS = 400
ROWS = 64
LEVELS = 8
_WIDTH, _LEFT, _RIGHT = 960.0, 64.0, 16.0
_PLOT = _WIDTH - _LEFT - _RIGHT


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


def time_bars(ranks: Sequence[int], times: Sequence[Breakdown]) -> str:
    """Return one stacked bar per rank: seconds by phase, shares written where they fit."""
    top = max((spent.total_s for spent in times), default=0.0) or 1.0
    height, gap = (22.0, 6.0) if len(ranks) <= 16 else (11.0, 3.0)
    bottom = len(ranks) * (height + gap) + 4
    parts = []
    for at in svg.ticks(top, 6):
        x = _LEFT + at / top * _PLOT
        parts.append(svg.line((x, 0), (x, bottom), "grid"))
        parts.append(svg.text(x, bottom + 16, f"{at:g}", "tick", "middle"))
    for i, (rank, spent) in enumerate(zip(ranks, times, strict=True)):
        y = i * (height + gap) + gap / 2
        parts.append(svg.text(_LEFT - 8, y + height / 2 + 4, f"rank {rank}", "label", "end"))
        x = _LEFT
        for name, seconds in spent.items():
            width = seconds / top * _PLOT
            share = seconds / max(spent.total_s, 1e-12)
            if width < 0.2:
                x += width
                continue
            title = f"rank {rank}, {name}: {format_seconds(seconds)}, {format_share(share)}"
            parts.append(svg.rect(x, y, width, height, f"phase {name}", title))
            if width > 40 and height > 15:
                middle = y + height / 2 + 4
                share_text = format_share(share)
                parts.append(svg.text(x + width / 2, middle, share_text, f"on-{name}", "middle"))
            x += width
    parts.append(svg.text(_LEFT + _PLOT, bottom + 32, "seconds", "axis", "end"))
    return svg.drawing(_WIDTH, bottom + 38, parts, "Time of each rank by phase")


def legend(present: Sequence[str]) -> str:
    """Return the phases that occur, each with its colour, as HTML."""
    items = []
    for phase in PHASES:
        if phase in present:
            swatch = svg.rect(0, 0, 12, 12, f"phase {phase}")
            box = f'<svg viewBox="0 0 12 12" aria-hidden="true">{swatch}</svg>'
            items.append(f"<span>{box}{phase}</span>")
    return f'<p class="legend">{"".join(items)}</p>'


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
) -> str:
    """Return skew by rank and step as a heat map, stragglers' windows framed.

    Args:
        skew_s: shape (ranks, steps).
        ranks: numbers of the rows.
        stragglers: to frame.
        top_s: skew that gets the strongest colour.
    """
    count, steps = skew_s.shape
    cells = worst(skew_s)
    rows, columns = cells.shape
    row_px = 26.0 if rows <= 8 else max(7.0, 260.0 / rows)
    width, height = _PLOT / columns, rows * row_px
    level = np.rint(np.clip(cells / top_s, 0, 1) * LEVELS).astype(int)
    parts = [svg.rect(_LEFT, 4, _PLOT, height, "heat-none")]
    scale = f"translate({_LEFT:g} 4) scale({width:.5f} {row_px:.5f})"
    for strength in range(1, LEVELS + 1):
        shape = _runs(level == strength)
        if shape:
            parts.append(svg.path(shape, f"heat-{strength}", scale))
    every = max(1, -(-rows // 16))
    edges = blocks(count, ROWS)
    for row in range(0, rows, every):
        name = f"rank {ranks[edges[row]]}"
        parts.append(svg.text(_LEFT - 8, 4 + (row + 0.5) * row_px + 4, name, "label", "end"))
    for late in stragglers[:ROWS]:
        row = int(np.searchsorted(edges, list(ranks).index(late.rank), "right")) - 1
        x = _LEFT + late.first_step / steps * _PLOT
        wide = (late.last_step + 1 - late.first_step) / steps * _PLOT
        title = f"rank {late.rank}, steps {late.first_step} to {late.last_step}"
        parts.append(svg.rect(x, 4 + row * row_px, wide, row_px, "frame", title))
    parts += _step_axis(steps, 4 + height)
    return svg.drawing(_WIDTH, height + 46, parts, "Skew by rank and step")


def skew_key(top_s: float) -> str:
    """Return the heat map's colours with what they stand for, as HTML."""
    swatches = "".join(svg.rect((i - 1) * 14, 0, 14, 12, f"heat-{i}") for i in range(1, LEVELS + 1))
    box = svg.rect(0, 0, LEVELS * 14, 12, "heat-none")
    strip = (
        f'<svg class="key" viewBox="0 0 {LEVELS * 14} 12" aria-hidden="true">{box}{swatches}</svg>'
    )
    return f'<p class="legend"><span>0 s {strip} {format_seconds(top_s, 2)} late or more</span></p>'


def step_lines(step_s: np.ndarray, ranks: Sequence[int]) -> str:
    """Return step time over steps: a line per rank, or their range when there are many.

    The scale ends a little above what all but 2 % of the columns reach; longer steps are marked at
    its upper edge.
    """
    _, steps = step_s.shape
    cells = worst(step_s, rows=max(1, len(step_s)))
    columns = cells.shape[1]
    top = 1.2 * float(np.percentile(cells.max(axis=0), 98)) or 1.0
    height, head = 150.0, 12.0
    factor, unit = (1e3, "ms") if top < 1 else (1.0, "s")

    def y(seconds: float) -> float:
        return head + height * (1 - min(seconds, top) / top)

    x = _LEFT + (np.arange(columns) + 0.5) / columns * _PLOT
    parts = []
    for at in svg.ticks(top * factor, 4):
        parts.append(svg.line((_LEFT, y(at / factor)), (_LEFT + _PLOT, y(at / factor)), "grid"))
        parts.append(svg.text(_LEFT - 8, y(at / factor) + 4, f"{at:g}", "tick", "end"))
    parts.append(svg.turned_text(14, head + height / 2, f"step time, {unit}", "axis"))
    if len(ranks) <= 8:
        for i, rank in enumerate(ranks):
            points = [(px, y(s)) for px, s in zip(x.tolist(), cells[i].tolist(), strict=True)]
            parts.append(svg.polyline(points, f"line line-{i}", f"rank {rank}"))
    else:
        low, high = cells.min(axis=0).tolist(), cells.max(axis=0).tolist()
        upper = [(px, y(s)) for px, s in zip(x.tolist(), high, strict=True)]
        lower = [(px, y(s)) for px, s in zip(x.tolist(), low, strict=True)]
        parts.append(svg.polygon(upper + lower[::-1], "band"))
        middle = np.median(cells, axis=0).tolist()
        points = [(px, y(s)) for px, s in zip(x.tolist(), middle, strict=True)]
        parts.append(svg.polyline(points, "line line-0", "median of the ranks"))
    for column in np.flatnonzero(cells.max(axis=0) > top)[:COLUMNS]:
        px, title = float(x[column]), format_seconds(float(cells[:, column].max()))
        parts.append(svg.polygon([(px - 4, head), (px + 4, head), (px, head - 7)], "beyond"))
        if column == 0:
            parts.append(svg.text(px + 8, head - 1, title, "tick"))
    parts += _step_axis(steps, head + height)
    return svg.drawing(_WIDTH, head + height + 40, parts, "Step time over steps")


def pair_bar(predicted_s: float | None, measured_s: float, top_s: float) -> str:
    """Return two small bars, the prediction above the measurement, on a scale up to `top_s`."""
    top = max(top_s, 1e-12)
    parts = [svg.rect(0, 9, 180 * measured_s / top, 7, "measured")]
    if predicted_s is not None:
        parts.append(svg.rect(0, 0, 180 * predicted_s / top, 7, "predicted"))
    return f'<svg class="pair" viewBox="0 0 180 16" aria-hidden="true">{"".join(parts)}</svg>'


def _step_axis(steps: int, y: float) -> list[str]:
    parts = [svg.line((_LEFT, y), (_LEFT + _PLOT, y), "rule")]
    for at in svg.ticks(steps, 8):
        x = _LEFT + at / max(1, steps) * _PLOT
        parts.append(svg.line((x, y), (x, y + 4), "rule"))
        if at == int(at):
            parts.append(svg.text(x, y + 17, f"{int(at):,}", "tick", "middle"))
    parts.append(svg.text(_LEFT + _PLOT, y + 34, "step", "axis", "end"))
    return parts


def _runs(chosen: np.ndarray) -> str:
    """Return a path in cells: one rectangle for each run of chosen cells in a row."""
    paths = []
    for row, cells in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], cells.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            paths.append(f"M{begin} {row}h{end - begin}v1h{begin - end}z")
    return "".join(paths)
