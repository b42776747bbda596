"""The nodes that served a run's data: where the bytes of the programs on each came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.data_nodes import data_words, node_note, node_rows
from paceline.report.page import svg
from paceline.report.page.chart import FIELD, LABEL_X, Chart, render
from paceline.report.page.markup import section, table
from paceline.report.units import format_bytes, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.report.model import Report
    from paceline.runs.data_report import DataReport

_ROW_PX, _GAP_PX = 22.0, 6.0
_MOST_BARS = 32
_ROOM = 0.08  # of the bar: narrower parts have no share written into them
# Field of the report, colour of the phase that it borrows, words.
_TIERS = (
    ("local_bytes", "forward", "on the node itself"),
    ("peer_bytes", "transfer", "from other nodes"),
    ("program_source_bytes", "input", "from the source"),
)


def nodes(report: Report) -> str:
    """Return what each node did with the run's data; nothing for a run without."""
    use = report.data
    if use is None:
        return ""
    read = [(k, node) for k, node in enumerate(use.nodes) if node.read_bytes][:_MOST_BARS]
    heads, rows = node_rows(use)
    chart = render(tier_bars(read)) if read else ""
    return section(
        "Data nodes",
        f"{data_words(use)} {node_note(use)}".strip(),
        chart,
        table(heads, rows, names=2),
    )


def tier_bars(nodes: Sequence[tuple[int, DataReport]]) -> Chart:
    """Return one bar per node: the share of its programs' bytes by where they came from.

    Args:
        nodes: with their numbers in the table.
    """
    bottom = len(nodes) * (_ROW_PX + _GAP_PX)
    marks = [
        svg.line(at / 100 * FIELD, 0, at / 100 * FIELD, bottom, "grid") for at in svg.ticks(100, 6)
    ]
    labels, over = [], []
    for row, (number, node) in enumerate(nodes):
        y = row * (_ROW_PX + _GAP_PX) + _GAP_PX / 2
        middle_y = y + _ROW_PX / 2 + 4
        labels.append(svg.text(LABEL_X, middle_y, f"node {number}", "label", "end"))
        begin = 0.0
        for field, phase, words in _TIERS:
            count = getattr(node, field)
            share = count / node.read_bytes
            title = f"{node.node}, {words}: {format_bytes(count)}, {format_share(share)}"
            if count:
                width = share * FIELD
                marks.append(svg.rect(begin * FIELD, y, width, _ROW_PX, f"phase {phase}", title))
            if share >= _ROOM:
                at = svg.percent(begin + share / 2)
                over.append(svg.text(at, middle_y, format_share(share), f"on-{phase}", "middle"))
            begin += share
    return Chart(
        name="data-nodes",
        title="Where each node's bytes came from",
        description="A bar per node, divided by where the bytes that its programs read came from. "
        "The table below has the numbers.",
        unit="% of bytes",
        end=100,
        height_px=bottom,
        marks=marks,
        labels=labels,
        over=over,
        legend=[
            (svg.swatch([svg.rect(0, 0, 14, 12, f"phase {phase}")]), words)
            for _, phase, words in _TIERS
        ],
    )
