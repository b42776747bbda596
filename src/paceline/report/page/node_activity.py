"""What the nodes of a run did second by second: a chart of shares, and all figures in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.node_activity import ACTIVITY_HEADS, activity_rows
from paceline.report.page import svg
from paceline.report.page.chart import (
    FIELD,
    Chart,
    line_sample,
    numbered_line,
    render,
    vertical_scale,
)
from paceline.report.page.markup import details, section, table
from paceline.report.units import plural
from paceline.trace.analysis.nodes import BYTES, SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.report.model import Report
    from paceline.trace.analysis.nodes import NodeActivity, NodeSeries

_HEIGHT_PX = 110.0
_NODES = 8  # of a chart
_TABLE_NODES = 32


def activity(report: Report) -> str:
    """Return what the nodes did; nothing where their counters were not recorded."""
    nodes = report.nodes
    if not nodes:
        return ""
    names, cells = activity_rows(nodes, _TABLE_NODES)
    rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
    note = (
        "What each node did as a whole, other programs included, counted once a second. Networks "
        "are those between hosts: traffic within a host is not among them."
    )
    if len(nodes) > _NODES:
        note += f" The chart shows {_NODES} of {plural(len(nodes), 'node')}."
    return section(
        "Nodes",
        note,
        render(share_lines(nodes[:_NODES])),
        details("Numbers", table(["node", *ACTIVITY_HEADS], rows, names=2)),
    )


def share_lines(nodes: Sequence[NodeActivity]) -> Chart:
    """Return the shares over time of what each node has: cores, memory, GPUs."""
    end_s = max(node.ends_s[-1] for node in nodes)
    marks, labels = vertical_scale(100.0, 3, _HEIGHT_PX, "in use, %", "g")
    legend: list[tuple[str, str]] = []
    for node in nodes:
        for series in node.series:
            shares = _shares(node, series)
            if not shares or (series.name == "stolen" and not series.most):
                continue
            style = numbered_line(len(legend))
            begins_s = (node.begin_s, *node.ends_s[:-1])
            points = [
                ((begin + end) / 2 / end_s * FIELD, _HEIGHT_PX * (1 - min(1.0, share)))
                for begin, end, share in zip(begins_s, node.ends_s, shares, strict=True)
            ]
            marks.append(svg.polyline(points, style))
            name = series.name if len(nodes) == 1 else f"{node.node}, {series.name}"
            legend.append((line_sample(style), name))
    return Chart(
        name="nodes",
        title="What the nodes did over time",
        description="A line for each of a node's cores, memory and GPUs: the share of it that was "
        "in use. The table below has these and other figures.",
        unit="s",
        end=end_s,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=legend,
    )


def _shares(node: NodeActivity, series: NodeSeries) -> tuple[float, ...]:
    """Return a series as shares of what the node has; empty if it is of something else."""
    if series.unit == SHARE:
        return series.values
    if series.unit == BYTES and series.name == "memory" and node.memory_bytes:
        return tuple(value / node.memory_bytes for value in series.values)
    return ()
