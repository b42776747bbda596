"""Memory: what training itself needs, as predicted, beside what each process held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.page.markup import details, section, table
from paceline.report.page.sampled import memory_table
from paceline.report.page.times import MAX_ROWS
from paceline.report.units import format_bytes, plural

if TYPE_CHECKING:
    from paceline.report.model import Report


def peaks(report: Report) -> str:
    """Return predicted memory by kind beside what was measured."""
    ranks = sorted(report.trace.ranks, key=lambda rank: -rank.status.peak_memory_bytes)
    parts = []
    note = (
        "Measured is the largest resident memory of the whole process, with the interpreter, its "
        "libraries and what the allocator keeps."
    )
    if report.estimate is not None:
        kinds = sorted(report.estimate.memory_bytes.items(), key=lambda item: -item[1])
        rows = [[name, format_bytes(count)] for name, count in kinds]
        rows.append(["together", format_bytes(sum(count for _, count in kinds))])
        parts.append(table(["predicted, per rank", "bytes"], rows, total=True))
        note += " Predicted is what training itself needs: the two count different things."
    rows = [
        [f"rank {rank.rank}", format_bytes(rank.status.peak_memory_bytes)]
        for rank in ranks[:MAX_ROWS]
    ]
    measured = table(["measured peak, resident", "bytes"], rows)
    parts.append(measured if len(rows) <= 8 else details(plural(len(rows), "rank"), measured))
    held = memory_table(report)
    if held:
        note += (
            " What held it is the most in any of the steps in which it was counted; activations "
            "are what a forward pass left for the backward pass."
        )
    return section("Memory", note, f'<div class="pairs">{"".join(parts)}</div>', held)
