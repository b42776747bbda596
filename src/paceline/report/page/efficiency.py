"""What the ranks waited for, who caused it, what would shorten steps; traffic between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.report.efficiency import (
    call_rows,
    delay_rows,
    efficiency_sentence,
    factor_rows,
    level_rows,
    matrix_words,
    path_rows,
    replay_words,
    what_if_rows,
)
from paceline.report.page import svg
from paceline.report.page.chart import FIELD, LABEL_X, Chart, blocks, render
from paceline.report.page.markup import details, section, table
from paceline.report.units import format_bytes, plural

if TYPE_CHECKING:
    from paceline.report.model import Report
    from paceline.trace.efficiency.matrix import CommunicationMatrix

_MOST_RANKS = 64
_LEVELS = 8  # of colour; see page.css
_MOST_PAIRS = 128


def efficiency(report: Report) -> str:
    """Return the factors of parallel efficiency, what-ifs, critical path and wait states."""
    found = report.efficiency
    if found is None:
        return ""
    note = (
        f"{efficiency_sentence(found)} Of steps {found.first_step:,} to {found.last_step:,}. "
        "Each factor is a share of 100 %; overall efficiency is their product. A what-if replays "
        "the steps with what ranks waited for changed. "
        f"{replay_words(found)}"
    )
    factors, what_ifs, path = factor_rows(found.metrics), what_if_rows(found), path_rows(found)
    parts = [
        '<div class="pairs">',
        f"<div>{table(*factors, names=2)}</div>",
        f"<div>{table(*what_ifs)}{table(*path, names=2)}</div></div>",
    ]
    if found.waits.calls:
        parts.append(table(*call_rows(found), names=4))
        parts.append(table(*delay_rows(found), names=2))
    return section("Efficiency and waits", note, *parts)


def matrix(report: Report) -> str:
    """Return how much each rank sent to each other one."""
    if report.efficiency is None or not report.efficiency.matrix.pairs:
        return ""
    found = report.efficiency.matrix
    note = f"Bytes that each rank sent to each other one over the run. {matrix_words(found)}"
    heads = ("ranks", "messages", "of messages", "of collectives")
    rows = [
        (
            f"{pair.source} to {pair.target}",
            f"{pair.messages:,}",
            format_bytes(pair.message_bytes),
            format_bytes(pair.collective_bytes),
        )
        for pair in found.pairs[:_MOST_PAIRS]
    ]
    words = f"Numbers of {plural(len(rows), 'pair')}, those with most bytes first"
    return section(
        "Traffic between ranks",
        note,
        f'<div class="square">{render(matrix_chart(found, report.world_size))}</div>',
        table(("links", *heads[1:]), level_rows(found)),
        details(words, table(heads, rows)),
    )


def matrix_chart(found: CommunicationMatrix, world_size: int) -> Chart:
    """Return bytes by sender (rows) and receiver (columns); a cell is the most of several pairs."""
    edges = blocks(world_size, _MOST_RANKS)
    cells = len(edges) - 1
    pairs = np.array(
        [(pair.source, pair.target, pair.message_bytes + pair.collective_bytes)
         for pair in found.pairs], dtype=np.int64,
    )  # fmt: skip
    sent = np.zeros((cells, cells))
    rows, columns = (np.searchsorted(edges, pairs[:, side], "right") - 1 for side in (0, 1))
    np.maximum.at(sent, (rows, columns), pairs[:, 2])
    top = sent.max() or 1.0
    row_px = max(5.0, min(26.0, 320.0 / cells))
    height = cells * row_px
    marks = [svg.rect(0, 0, FIELD, height, "heat-none")]
    width = FIELD / cells
    level = np.ceil(sent / top * _LEVELS).astype(int)
    for row, column in np.argwhere(level > 0).tolist():
        title = (
            f"rank {edges[row]} to rank {edges[column]}: {format_bytes(float(sent[row, column]))}"
        )
        style = f"heat-{level[row, column]}"
        marks.append(svg.rect(column * width, row * row_px, width, row_px, style, title))
    every = max(1, -(-cells // 16))
    return Chart(
        name="matrix",
        title="Bytes from rank to rank",
        description="A row for each rank that sends and a column for each that receives: the "
        "stronger the colour, the more bytes. The table has the numbers.",
        unit="receiving rank",
        end=world_size,
        height_px=height,
        marks=marks,
        labels=[
            svg.text(LABEL_X, (row + 0.5) * row_px + 4, f"rank {edges[row]}", "label", "end")
            for row in range(0, cells, every)
        ],
        legend=[
            (svg.swatch([svg.rect(0, 0, 14, 12, "heat-1")]), "few"),
            (svg.swatch([svg.rect(0, 0, 14, 12, "heat-8")]), f"{format_bytes(float(top))}"),
        ],
    )
