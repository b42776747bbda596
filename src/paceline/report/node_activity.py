"""What each node did second by second, as rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.units import format_bytes, format_rate, format_share, significant
from paceline.trace.analysis.nodes import BYTES, RATE, SHARE, WATTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.nodes import NodeActivity, NodeSeries

ACTIVITY_HEADS = ("figure", "mean", "most")


def activity_rows(nodes: Sequence[NodeActivity], most: int) -> tuple[list[str], list[list[str]]]:
    """Return names and cells of a table under `ACTIVITY_HEADS`; figures that stayed 0 are left out.

    Args:
        nodes: of the run.
        most: nodes to show.
    """
    names, cells = [], []
    for node in nodes[:most]:
        for series in node.series:
            if series.most:
                names.append(node.node)
                of_all = f" of {format_bytes(node.memory_bytes)}" if series.name == "memory" else ""
                name = series.name + (f", {node.cores} cores" if series.name == "cpu" else of_all)
                cells.append([name, *(format_figure(series, value) for value in
                                      (series.mean, series.most))])  # fmt: skip
    return names, cells


def format_figure(series: NodeSeries, value: float) -> str:
    """Return a value of a series with its unit."""
    if series.unit == SHARE:
        return format_share(value)
    if series.unit == BYTES:
        return format_bytes(value)
    if series.unit == RATE:
        return format_rate(value)
    return f"{significant(value)} W" if series.unit == WATTS else significant(value)
