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
from paceline.report.words import gap_words, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from paceline.core.estimate import Estimate
    from paceline.perf.calibrate import Calibration
    from paceline.report.model import Report
    from paceline.trace.analysis.communication import Traffic
    from paceline.trace.analysis.host import HostTime
    from paceline.trace.analysis.stats import TraceStats
    from paceline.trace.merge.matches import Mismatch

_ROWS = 16
_HOST_ROWS, _HOST_RANKS = 8, 4


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
        dropped = f"{plural(report.dropped_count, 'event')} could not be recorded"
        parts.append(Text(dropped, style="yellow"))
    if report.steps:
        parts += [Text(), _phases(report)]
        left = len(report.rank_phases) - _ROWS
        if left > 0:
            parts.append(Text(f"and {plural(left, 'rank')} more"))
        if any(rank.host for rank in report.rank_phases):
            parts += [Text(), _host_work([(rank.rank, rank.host) for rank in report.rank_phases])]
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
            "complete" if rank.complete else "truncated",
        )
    # Without units in its cells, and its steps among the events, this table fits 80 columns.
    present = [name for name in PHASES if any(getattr(r.breakdown, name) for r in stats.ranks)]
    times = _table("seconds", [*present, "loop"])
    for rank in stats.ranks:
        spent = [significant(getattr(rank.breakdown, name)) for name in present]
        times.add_row(f"rank {rank.rank}", *spent, significant(rank.loop_wall_s))
    parts: list[RenderableType] = [events, Text(), times, Text(), clocks]
    if any(rank.host for rank in stats.ranks):
        parts += [Text(), _host_work([(rank.rank, rank.host) for rank in stats.ranks])]
    if stats.traffic:
        parts += [Text(), _traffic(stats.traffic)]
    untimed = sum(line.untimed_count for line in stats.traffic)
    for sentence in gap_words(untimed, stats.mismatch_count):
        parts += [Text(), Text(sentence, style="yellow")]
    if stats.mismatches:
        parts += [Text(), _mismatches(stats.mismatches)]
    return Group(*parts)


def _host_work(ranks: Sequence[tuple[int, Sequence[HostTime]]]) -> Table:
    """Return the names of the work between phases, the longest first, with seconds by rank."""
    by_name: dict[str, dict[int, float]] = {}
    for rank, times in ranks:
        for time in times:
            spent = by_name.setdefault(time.name, {})
            spent[rank] = spent.get(rank, 0.0) + time.measured_s
    shown_ranks = [rank for rank, _ in ranks[:_HOST_RANKS]]
    shown = _table("host work, seconds", [f"rank {rank}" for rank in shown_ranks])
    longest = sorted(by_name, key=lambda name: -max(by_name[name].values()))
    for name in longest[:_HOST_ROWS]:
        spent = by_name[name]
        cells = [significant(spent[rank]) if rank in spent else "-" for rank in shown_ranks]
        shown.add_row(Text(printable(name)), *cells)
    return shown


def _mismatches(mismatches: Iterable[Mismatch]) -> Table:
    shown = _table("mismatch", ["number", "rank", "operation", "size"])
    for mismatch in mismatches:
        columns = zip(mismatch.ranks, mismatch.operations, mismatch.bytes, strict=True)
        for rank, operation, size in list(columns)[:_ROWS]:
            shown.add_row(
                Text(printable(mismatch.group.removeprefix("group "))),
                f"{mismatch.sequence:,}",
                f"{rank:,}",
                Text(printable(operation)),
                format_bytes(size),
            )
    return shown


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


def render_calibration(calibration: Calibration) -> Group:
    """Return what ``paceline calibrate`` shows."""
    shown = _table("phase", ["before", "measured", "now", "weight of the run"])
    for fit in calibration.phases:
        if fit.prior_s or fit.measured_s or fit.fitted_s:
            shown.add_row(
                fit.name,
                format_seconds(fit.prior_s),
                format_seconds(fit.measured_s),
                format_seconds(fit.fitted_s),
                format_share(fit.weight),
            )
    shown.add_row(
        Text("step", style="bold"),
        format_seconds(calibration.prior_step_s),
        format_seconds(calibration.measured_step_s),
        format_seconds(calibration.fitted_step_s),
        "",
    )
    return Group(
        Text(
            f"{printable(calibration.machine)}: fitted to "
            f"{plural(calibration.steps, 'undisturbed step')}",
            style="bold",
        ),
        Text(),
        shown,
    )


def _phases(report: Report) -> Table:
    total = report.total
    present = [name for name in PHASES if getattr(total, name) > 0]
    shown = _table("share", [*present, "loop"])
    late = {straggler.rank for straggler in report.stragglers}
    late_first = sorted(report.rank_phases, key=lambda rank: (rank.rank not in late, rank.rank))
    for rank in sorted(late_first[:_ROWS], key=lambda rank: rank.rank):
        spent = rank.breakdown()
        wall_s = max(spent.total_s, 1e-12)
        shares = [format_share(getattr(spent, name) / wall_s) for name in present]
        name = Text(f"rank {rank.rank}", style="bold" if rank.rank in late else "")
        shown.add_row(name, *shares, format_seconds(spent.total_s))
    return shown


def _comparison(report: Report) -> Table:
    shown = _table("undisturbed step", ["predicted", "measured", "ratio"])
    for phase in report.comparison.phases:
        if phase.measured_s > 0 or phase.predicted_s:
            ratio = "-" if phase.ratio is None else f"{phase.ratio:.2f}"
            predicted, measured = (
                format_seconds(phase.predicted_s),
                format_seconds(phase.measured_s),
            )
            shown.add_row(phase.name, predicted, measured, ratio)
    comparison = report.comparison
    error = format_share(comparison.step_time_error)
    shown.add_row(
        Text("step", style="bold"),
        format_seconds(comparison.predicted_step_s),
        format_seconds(comparison.measured_step_s),
        f"error {error}",
    )
    return shown


def _traffic(traffic: Iterable[Traffic]) -> Table:
    heads = ["group", "ranks", "size", "count", "transfer", "bandwidth"]
    shown = _table("collective", heads)
    for line in list(traffic)[:_ROWS]:
        shown.add_row(
            Text(printable(line.operation)),
            Text(printable(line.group.removeprefix("group "))),
            f"{line.ranks:,}",
            format_size_class(line.size_class_bytes),
            f"{line.count:,}",
            format_seconds(line.transfer_s),
            format_rate(line.bandwidth_bytes_per_s),
        )
    return shown


def _table(name: str, heads: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    shown.add_column(name)
    for head in heads:
        shown.add_column(head, justify="right")
    return shown
