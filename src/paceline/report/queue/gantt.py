"""Which job held which devices when: a row for each device, or shares where there are too many.

Jobs that share devices lie above each other within the row. Where a drawing would have more
rectangles than a browser draws quickly, or more devices than rows that can be seen, the chart shows
instead how much of some nodes was held in each part of the time.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.report.page import svg
from paceline.report.page.chart import COLUMNS, FIELD, LABEL_X, ROWS, Chart, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.report.queue.model import HeldDevices, PolicyRun

MAX_RECTANGLES = 3000
MAX_DEVICES = 256
COLOURS = 8
_LEVELS = 8
_HEIGHT_PX = 400.0
_ROW_PX = (3.0, 16.0)


class Bar(NamedTuple):
    """A rectangle of the chart.

    Attributes:
        held: whose it is.
        first, devices: rows that it covers.
        lane, lanes: which of the equal parts of these rows it covers.
    """

    held: HeldDevices
    first: int
    devices: int
    lane: int
    lanes: int


def colours_of(runs: Sequence[PolicyRun]) -> dict[str, int]:
    """Return a colour for each job by its name, the same under all policies."""
    colours: dict[str, int] = {}
    for run in runs:
        for held in sorted(run.held, key=lambda held: held.begin_s):
            colours.setdefault(held.name, len(colours) % COLOURS)
    return colours


def gantt(
    run: PolicyRun,
    nodes: Sequence[tuple[str, int]],
    *,
    name: str,
    end_s: float,
    colours: Mapping[str, int],
) -> tuple[Chart, str]:
    """Return the chart of a policy's devices over time, and what to know of it.

    Args:
        run: of the policy.
        nodes: name and number of devices of each node.
        name: of the chart, unique on the page.
        end_s: of the time axis.
        colours: by name of the job, see `colours_of`.
    """
    devices = sum(count for _, count in nodes)
    pieces = sum(len(held.pieces) for held in run.held)
    if pieces <= MAX_RECTANGLES and devices <= MAX_DEVICES:
        chart = _bars(run, nodes, end_s, name, colours)
        return chart, "A row is a device; point at a bar to see its job."
    note = (
        f"{pieces:,} times in which a job held devices, on {devices:,} devices, are too many to "
        "draw one by one: a cell shows the share of devices that were held."
    )
    return _shares(run, nodes, end_s, name), note


def lanes(run: Sequence[HeldDevices]) -> Iterator[Bar]:
    """Yield the bars, those of jobs that share devices in lanes of their own."""
    by_devices = sorted(run, key=lambda held: (held.pieces, held.begin_s))
    for pieces, members in groupby(by_devices, key=lambda held: held.pieces):
        for together in _overlapping(list(members)):
            free_s: list[float] = []  # when each lane becomes free
            placed = []
            for held in together:
                lane = next((i for i, at_s in enumerate(free_s) if at_s <= held.begin_s), None)
                if lane is None:
                    lane = len(free_s)
                    free_s.append(0.0)
                free_s[lane] = held.end_s
                placed.append((held, lane))
            for held, lane in placed:
                for first, count in pieces:
                    yield Bar(held, first, count, lane, len(free_s))


def shares(
    held: Sequence[HeldDevices], nodes: Sequence[tuple[str, int]], end_s: float
) -> np.ndarray:
    """Return the share of devices held, shape (rows, COLUMNS), rows being blocks of nodes."""
    counts = np.array([count for _, count in nodes])
    node_of = np.repeat(np.arange(len(nodes)), counts)
    edges = blocks(len(nodes), ROWS)
    row_of = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    # Jobs on the same devices count once: devices are held or not.
    busy = np.zeros((len(edges) - 1, COLUMNS))
    for pieces, members in groupby(sorted(held, key=lambda h: (h.pieces, h.begin_s)), _pieces):
        in_row: dict[int, int] = {}
        for first, count in pieces:
            for node in node_of[first : first + count]:
                row = int(row_of[node])
                in_row[row] = in_row.get(row, 0) + 1
        for together in _overlapping(list(members)):
            begin = together[0].begin_s / end_s * COLUMNS
            end = max(member.end_s for member in together) / end_s * COLUMNS
            for row, count in in_row.items():
                _add(busy[row], begin, end, count)
    per_row = np.add.reduceat(counts, edges[:-1])
    return np.minimum(1.0, busy / per_row[:, None])


def _pieces(held: HeldDevices) -> tuple[tuple[int, int], ...]:
    return held.pieces


def _overlapping(members: Sequence[HeldDevices]) -> Iterator[list[HeldDevices]]:
    """Yield the members, ordered by their begins, in groups that lie apart in time."""
    group: list[HeldDevices] = []
    end_s = 0.0
    for held in members:
        if group and held.begin_s >= end_s:
            yield group
            group, end_s = [], 0.0
        group.append(held)
        end_s = max(end_s, held.end_s)
    if group:
        yield group


def _add(row: np.ndarray, begin: float, end: float, amount: float) -> None:
    """Add an amount to the columns from `begin` to `end`, to the first and last in part."""
    first, last = int(begin), min(int(end), len(row) - 1)
    if first >= last:
        row[min(first, len(row) - 1)] += amount * (end - begin)
        return
    row[first] += amount * (first + 1 - begin)
    row[first + 1 : last] += amount
    row[last] += amount * (end - last)


def _bars(
    run: PolicyRun,
    nodes: Sequence[tuple[str, int]],
    end_s: float,
    name: str,
    colours: Mapping[str, int],
) -> Chart:
    devices = sum(count for _, count in nodes)
    row_px = min(max(_HEIGHT_PX / devices, _ROW_PX[0]), _ROW_PX[1])
    marks = []
    for bar in lanes(run.held):
        held = bar.held
        height = bar.devices * row_px / bar.lanes
        x = held.begin_s / end_s * FIELD
        width = max((held.end_s - held.begin_s) / end_s * FIELD, 0.2)
        y = bar.first * row_px + bar.lane * height
        title = f"{held.name}: {held.begin_s / 3600:.3g} to {held.end_s / 3600:.3g} h"
        marks.append(svg.rect(x, y, width, height, f"job-{colours[held.name]}", title))
    labels, first = [], 0
    step = max(1, round(14 / (row_px * devices / len(nodes))))
    for i, (node, count) in enumerate(nodes):
        marks.append(svg.line(0, first * row_px, FIELD, first * row_px, "rule"))
        if i % step == 0:
            middle = (first + count / 2) * row_px
            labels.append(svg.text(LABEL_X, middle + 4, node[:10], "label", "end"))
        first += count
    swatches = [svg.rect(4 * i, 0, 4, 12, f"job-{i}") for i in range(COLOURS)]
    return _chart(
        name, run, end_s, devices * row_px, marks, labels, [(svg.swatch(swatches, 32), "jobs")]
    )


def _shares(run: PolicyRun, nodes: Sequence[tuple[str, int]], end_s: float, name: str) -> Chart:
    cells = shares(run.held, nodes, end_s)
    row_px = min(max(_HEIGHT_PX / len(cells), _ROW_PX[0]), _ROW_PX[1])
    marks = []
    level = np.rint(cells * _LEVELS).astype(int)
    width = FIELD / COLUMNS
    for row, values in enumerate(level.tolist()):
        at = 0
        for value, members in groupby(values):
            count = len(list(members))
            if value:
                marks.append(
                    svg.rect(at * width, row * row_px, count * width, row_px, f"heat-{value}")
                )
            at += count
    edges = blocks(len(nodes), ROWS)[:-1].tolist()
    step = max(1, round(14 / row_px))
    labels = [
        svg.text(LABEL_X, (row + 0.5) * row_px + 4, nodes[edge][0][:10], "label", "end")
        for row, edge in enumerate(edges)
        if row % step == 0
    ]
    strip = [svg.rect(14 * (i - 1), 0, 14, 12, f"heat-{i}") for i in range(1, _LEVELS + 1)]
    legend = [(svg.swatch(strip, 14 * _LEVELS), "some to all devices held")]
    return _chart(name, run, end_s, len(cells) * row_px, marks, labels, legend)


def _chart(  # the parts of one chart
    name: str,
    run: PolicyRun,
    end_s: float,
    height_px: float,
    marks: Sequence[str],
    labels: Sequence[str],
    legend: Sequence[tuple[str, str]],
) -> Chart:
    return Chart(
        name=name,
        title=f"Devices over time under {run.figures.policy}",
        description="Which devices were held when. The table of policies has the shares.",
        unit="h",
        end=end_s / 3600,
        height_px=height_px,
        marks=marks,
        labels=labels,
        legend=legend,
    )
