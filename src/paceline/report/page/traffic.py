"""What the ranks communicated, and how fast, beside what the machine promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.model import modelled_s
from paceline.report.page.markup import section, table
from paceline.report.page.times import MAX_ROWS
from paceline.report.units import format_bytes, format_rate, format_seconds, format_size_class

if TYPE_CHECKING:
    from paceline.report.model import Report
    from paceline.trace.analysis.communication import Traffic

_HEADS = [
    "operation",
    "group",
    "path",
    "ranks",
    "size, up to",
    "count",
    "bytes per rank",
    "arrival",
    "transfer",
    "modelled transfer",
    "bandwidth",
    "modelled bandwidth",
]


def collectives(report: Report) -> str:
    """Return the run's collectives by operation, group and size."""
    if not report.traffic:
        return ""
    rows = [_row(report, line) for line in report.traffic[:MAX_ROWS]]
    note = (
        "Transfer is the median time from the arrival of the last rank to the last completion; "
        "arrival is the median time between the first and the last rank. Bandwidth is bytes that "
        "one rank gives, over transfer."
    )
    modelled = [modelled_s(line, report.machine, report.collectives) for line in report.traffic]
    if any(model_s is not None for model_s in modelled):
        note += (
            " The model is the machine's measured latency and bandwidth of this operation; '-' "
            "where it has none."
        )
    return section("Collectives", note, table(_HEADS, rows, names=2))


def _row(report: Report, line: Traffic) -> list[str]:
    model_s = modelled_s(line, report.machine, report.collectives)
    promised = line.typical_bytes / model_s if model_s and line.typical_bytes else None
    return [
        line.operation,
        line.group.removeprefix("group "),
        line.path or "-",
        f"{line.ranks:,}",
        format_size_class(line.size_class_bytes),
        f"{line.count:,}",
        format_bytes(line.bytes),
        format_seconds(line.spread_s),
        format_seconds(line.transfer_s),
        format_seconds(model_s),
        format_rate(line.bandwidth_bytes_per_s),
        format_rate(promised),
    ]
