"""What the numbers of the page rest on: script, versions, settings, machine, traces and clocks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paceline.report.page.markup import details, section, table
from paceline.report.page.times import MAX_ROWS
from paceline.report.units import (
    format_bytes,
    format_clock_error,
    format_rate,
    format_seconds,
    plural,
)

if TYPE_CHECKING:
    from paceline.core.machine import Rate
    from paceline.report.model import Report


# What the ranks got, which need not be what was set: core.allocator.
_ALLOCATORS = {
    "keep": "keep: freed memory stays with the ranks",
    "system": "system: the C library's defaults",
    "own": "own: as the environment of the run says",
}


def sources(report: Report) -> str:
    """Return what the numbers rest on."""
    config = report.config
    script = " ".join([str(config.get("script", "-")), *map(str, config.get("args", []))])
    rows: list[list[object]] = [["run", report.run], ["script", script]]
    rows += [
        [name, "not installed" if value is None else value]
        for name, value in report.versions.items()
        if name != "version"
    ]
    if isinstance(allocator := config.get("allocator"), dict):
        rows.append(["allocator", _ALLOCATORS.get(str(allocator.get("in_effect")), "-")])
    rows += [[*words.split(": ", 1)] for words in report.cores_words]
    settings = _settings(config.get("values"))
    settings += [  # those of the backend matter to few runs
        [f"collectives.{name}", value, provenance]
        for name, value, provenance in _settings(config.get("collectives_values"))
        if provenance != "default"
    ]
    tables = [table(["what", "value"], rows, names=2)]
    if settings:
        tables.append(table(["setting", "value", "provenance"], settings, names=3))
    parts = [f'<div class="pairs">{"".join(tables)}</div>', _machine(report)]
    parts.append(_clocks(report))
    return section("Provenance", "", *parts)


def _settings(values: object) -> list[list[object]]:
    """Return name, value and provenance of each setting of ``config.json``."""
    return [
        [name, json.dumps(setting.get("value")), setting.get("provenance")]
        for name, setting in (values.items() if isinstance(values, dict) else ())
        if isinstance(setting, dict)
    ]


def _machine(report: Report) -> str:
    machine = report.machine
    if machine is None:
        return ""
    rows = [["machine", machine.name, plural(machine.nodes, "node")]]
    rows += [
        [f"device {i}", device.name, f"{plural(device.cores, 'core')}, {_sources(device.rates)}"]
        for i, device in enumerate(machine.devices)
    ]
    rows += [
        [
            f"link {link.level}",
            f"{format_seconds(link.latency_s.value)} + bytes at "
            f"{format_rate(link.bandwidth_bytes_per_s.value)}",
            link.bandwidth_bytes_per_s.source,
        ]
        for link in machine.links
    ]
    rows += [
        [
            cost.label,
            f"{format_seconds(cost.points[0].seconds.value)} to "
            f"{format_seconds(cost.points[-1].seconds.value)} for "
            f"{format_bytes(cost.points[-1].bytes)}",
            f"{cost.ranks} ranks{f' on {cost.hosts} hosts' if cost.hosts > 1 else ''}, "
            f"{cost.points[0].seconds.source}",
        ]
        for cost in machine.collectives
    ]
    rows += [["missing", text, ""] for text in machine.missing]
    return table(["machine", "value", "source"], rows, names=3)


def _sources(rates: tuple[Rate, ...]) -> str:
    sources = sorted({rate.source for rate in rates})
    return f"rates: {', '.join(sources)}" if sources else "no rates"


def _clocks(report: Report) -> str:
    rows = [
        [
            f"rank {rank.rank}",
            format_seconds(report.trace.clocks[i].offset_ns / 1e9),
            f"{report.trace.clocks[i].drift * 1e6:.2f} ppm",
            format_clock_error(report.trace.clocks[i].error_ns),
            f"{len(report.trace.clocks[i].later):,}",
            f"{rank.status.recorded_count:,}",
            f"{rank.status.dropped_count:,}",
            "complete" if rank.complete else "truncated",
        ]
        for i, rank in enumerate(report.trace.ranks[:MAX_ROWS])
    ]
    heads = [
        "trace",
        "clock offset",
        "drift",
        "changes",
        "error at most",
        "events",
        "dropped",
        "file",
    ]
    note = ""
    if any(clock.error_ns is None for clock in report.trace.clocks):
        note = (
            "No collective bounds the clocks whose error is unknown, or too few bound one that was "
            "set during the run: skew and waiting between these nodes may be wrong by as much. "
        )
    return details("Traces and clocks", f"<p>{note}</p>" * bool(note) + table(heads, rows))
