"""The report for a terminal: the verdict, and the tables that fit a screen.

Names come from scripts and files, so they reach the terminal as `Text` without markup, and with
control characters written out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.core.breakdown import PHASES
from paceline.report.units import (
    format_bytes,
    format_clock_error,
    format_rate,
    format_seconds,
    format_share,
    format_size_class,
    plural,
    significant,
)
from paceline.report.words import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from paceline.core.estimate import Estimate
    from paceline.report.model import Report
    from paceline.trace.communication import Traffic
    from paceline.trace.stats import TraceStats

_ROWS = 16


def render_terminal(report: Report) -> Group:
    """Return what ``paceline report`` shows."""
    steps = "no step recorded"
    if report.steps:
        steps = f"{plural(report.steps, 'step')} of {format_seconds(report.step_time_s)}"
    failed = report.result is not None and report.result.failure is not None
    parts: list[RenderableType] = [
        Text(printable(report.words), style="bold red" if failed else "bold"),
        Text(
            f"{plural(report.world_size, 'rank')}, {steps}, "
            f"peak memory {format_bytes(report.peak_memory_bytes)}"
        ),
    ]
    if report.dropped_count:
        lost = f"{plural(report.dropped_count, 'event')} could not be recorded"
        parts.append(Text(lost, style="yellow"))
    if report.steps:
        parts += [Text(), _phases(report)]
        left = len(report.parts) - _ROWS
        if left > 0:
            parts.append(Text(f"and {plural(left, 'rank')} more"))
    if report.comparison.predicted_step_s is not None:
        parts += [Text(), _comparison(report)]
    elif report.comparison.unfit:
        parts += [Text(), Text(f"not compared: {report.comparison.unfit}", style="yellow")]
    if report.traffic:
        parts += [Text(), _traffic(report.traffic)]
    return Group(*parts)


def render_stats(stats: TraceStats) -> Group:
    """Return what ``paceline trace stats`` shows."""
    kinds = sorted({kind for rank in stats.ranks for kind in rank.events})
    events = _table("events", kinds)
    clocks = _table("clock", ["offset", "drift", "error at most", "dropped", "file"])
    for rank in stats.ranks:
        name = f"rank {rank.rank}"
        events.add_row(name, *(f"{rank.events.get(kind, 0):,}" for kind in kinds))
        clocks.add_row(
            name,
            format_seconds(rank.clock_offset_ns / 1e9),
            f"{rank.clock_drift * 1e6:.2f} ppm",
            format_clock_error(rank.clock_error_ns),
            f"{rank.dropped_count:,}",
            "whole" if rank.complete else "ends early",
        )
    # Without units in its cells, and its steps among the events, this table fits 80 columns.
    present = [one for one in PHASES if any(getattr(r.breakdown, one) for r in stats.ranks)]
    times = _table("seconds", [*present, "loop"])
    for rank in stats.ranks:
        spent = [significant(getattr(rank.breakdown, one)) for one in present]
        times.add_row(f"rank {rank.rank}", *spent, significant(rank.loop_wall_s))
    parts: list[RenderableType] = [events, Text(), times, Text(), clocks]
    if stats.traffic:
        parts += [Text(), _traffic(stats.traffic)]
    return Group(*parts)


def render_estimate(estimate: Estimate) -> Group:
    """Return what ``paceline plan`` shows."""
    low, high = format_seconds(estimate.low_s), format_seconds(estimate.high_s)
    ranks = plural(estimate.plan.mesh.world_size, "rank")
    threads = plural(estimate.plan.threads, "thread")
    phases = _table("phase", ["predicted", "of the step"])
    phases.add_column("rests on")
    for name, seconds in estimate.breakdown.items():
        if seconds:
            share = format_share(seconds / estimate.step_time_s)
            phases.add_row(name, format_seconds(seconds), share, estimate.sources.get(name, ""))
    memory = _table("memory of a rank", ["predicted"])
    for name, count in estimate.memory_bytes.items():
        if count:
            memory.add_row(name, format_bytes(count))
    memory.add_row(
        Text("together", style="bold"), format_bytes(sum(estimate.memory_bytes.values()))
    )
    return Group(
        Text(
            f"{printable(estimate.workload)}: {format_seconds(estimate.step_time_s)} per step "
            f"({low} to {high}) on {ranks} of {threads}, limited by "
            f"{estimate.limit}",
            style="bold",
        ),
        Text(),
        phases,
        Text(),
        memory,
    )


def _phases(report: Report) -> Table:
    total = report.total
    present = [name for name in PHASES if getattr(total, name) > 0]
    shown = _table("share", [*present, "loop"])
    late = {one.rank for one in report.stragglers}
    parts = sorted(report.parts, key=lambda one: (one.rank not in late, one.rank))[:_ROWS]
    for part in sorted(parts, key=lambda one: one.rank):
        spent = part.breakdown()
        wall_s = max(spent.total_s, 1e-12)
        shares = [format_share(getattr(spent, name) / wall_s) for name in present]
        name = Text(f"rank {part.rank}", style="bold" if part.rank in late else "")
        shown.add_row(name, *shares, format_seconds(spent.total_s))
    return shown


def _comparison(report: Report) -> Table:
    shown = _table("undisturbed step", ["predicted", "measured", "ratio"])
    for one in report.comparison.phases:
        if one.measured_s > 0 or one.predicted_s:
            ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
            predicted, measured = format_seconds(one.predicted_s), format_seconds(one.measured_s)
            shown.add_row(one.name, predicted, measured, ratio)
    found = report.comparison
    error = format_share(found.step_time_error)
    shown.add_row(
        Text("step", style="bold"),
        format_seconds(found.predicted_step_s),
        format_seconds(found.measured_step_s),
        f"error {error}",
    )
    return shown


def _traffic(traffic: Iterable[Traffic]) -> Table:
    heads = ["group", "ranks", "size", "count", "transfer", "bandwidth"]
    shown = _table("collective", heads)
    for one in list(traffic)[:_ROWS]:
        shown.add_row(
            Text(printable(one.operation)),
            Text(printable(one.group.removeprefix("group "))),
            f"{one.ranks:,}",
            format_size_class(one.size_class_bytes),
            f"{one.count:,}",
            format_seconds(one.transfer_s),
            format_rate(one.bandwidth_bytes_per_s),
        )
    return shown


def _table(name: str, heads: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    shown.add_column(name)
    for head in heads:
        shown.add_column(head, justify="right")
    return shown
