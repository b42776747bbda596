"""The report for a terminal: the verdict, and tables that fit the screen.

Names come from scripts and files, so they reach the terminal as `Text` without markup, and with
control characters written out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.core.breakdown import PHASES
from paceline.core.plan import Plan
from paceline.report.advice.gather import mean_times
from paceline.report.compare import shown_cells, shown_phases
from paceline.report.data_nodes import node_rows
from paceline.report.files import HEADS, file_rows, shown_files
from paceline.report.fitting_table import FittingTable
from paceline.report.loader import HEADS as LOADER_HEADS
from paceline.report.loader import loader_rows
from paceline.report.memory_fit import render_memory_fit, render_stage_fits
from paceline.report.model import modelled_s
from paceline.report.node_activity import ACTIVITY_HEADS, activity_rows
from paceline.report.pipeline import cause_rows, rank_rows, transfer_words
from paceline.report.remedies import render_gains
from paceline.report.sampled import (
    LAYER_HEADS,
    OPERATOR_HEADS,
    layer_rows,
    layer_words,
    memory_rows,
    operator_rows,
)
from paceline.report.stages import render_candidates, render_stages
from paceline.report.units import (
    format_bytes,
    format_clock_error,
    format_rate,
    format_seconds,
    format_share,
    format_size_class,
    plural,
    seconds_that_add_up,
    shares_that_add_up,
    shown_parts,
    significant,
)
from paceline.report.words import gap_words, path_words, phase_label, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from paceline.core.estimate import Estimate
    from paceline.perf.calibrate import Calibration
    from paceline.report.compare import Comparison
    from paceline.report.model import Report
    from paceline.trace.analysis.communication import Traffic
    from paceline.trace.analysis.files import FileUse
    from paceline.trace.analysis.host import HostTime
    from paceline.trace.analysis.loader import LoaderCeiling
    from paceline.trace.analysis.nodes import NodeActivity
    from paceline.trace.analysis.sampled import StepSamples
    from paceline.trace.analysis.stats import TraceStats
    from paceline.trace.merge.matches import Mismatch

_ROWS = 16


def render_terminal(report: Report) -> Group:
    """Return what ``paceline report`` shows."""
    steps = "no step recorded"
    if report.steps:
        steps = f"{plural(report.steps, 'step')}, median {format_seconds(report.step_time_s)}"
    parts: list[RenderableType] = [
        render_verdict(report),
        Text(
            f"{plural(report.world_size, 'rank')}, {steps}, "
            f"peak memory {format_bytes(report.peak_memory_bytes)}"
        ),
    ]
    if report.steps:
        parts += [Text(), _phases(report)]
        left = len(report.rank_phases) - _ROWS
        if left > 0:
            parts.append(Text(f"and {plural(left, 'rank')} more"))
    parts += _pipeline(report)
    parts += _host_work(report.host_work, report.total.total_s, len(report.rank_phases))
    if report.comparison.predicted_step_s is not None:
        parts += [Text(), _comparison(report.comparison)]
        if not report.comparison.undisturbed_steps:
            words = (
                "in each step after the warm-up a rank was late: the measured step is such a one"
            )
            parts.append(Text(words, style="yellow"))
    elif report.comparison.not_compared:
        parts += [Text(), Text(f"not compared: {report.comparison.not_compared}", style="yellow")]
    if report.traffic:
        parts += [Text(), _traffic(report.traffic, report)]
    parts += _loader(report.loader)
    parts += _data_nodes(report)
    if report.remedies.forecast is not None:
        parts += [Text(), render_gains(*report.remedies)]
    if report.cores_words:
        parts += [Text(), *(Text(printable(words)) for words in report.cores_words)]
    return Group(*parts)


def render_verdict(report: Report) -> Group:
    """Return cautions, the verdict, and what would help."""
    failed = report.result is not None and report.result.failure is not None
    parts = [Text(printable(sentence), style="yellow") for sentence in report.cautions]
    parts.append(Text(printable(report.verdict), style="bold red" if failed else "bold"))
    parts += [Text(printable(f"What would help: {advice.sentence}")) for advice in report.advice]
    return Group(*parts)


def render_why(report: Report) -> Group:
    """Return what ``paceline why`` shows: the verdict, what would help, and the paths if known."""
    words = path_words(report.collective_paths)
    return Group(render_verdict(report), *([Text(printable(words))] if words else []))


def render_details(report: Report) -> Group:
    """Return the tables of ``paceline why --verbose``: stragglers, phases, loader, files."""
    parts: list[RenderableType] = []
    if report.stragglers:
        parts += [Text(), _stragglers(report)]
    if report.steps:
        parts += [Text(), _phases(report)]
    parts += _pipeline(report)
    parts += _data_nodes(report)
    parts += _loader(report.loader)
    parts += _host_work(report.host_work, report.total.total_s, len(report.rank_phases))
    parts += _sampled(report.sampled, report.total.total_s)
    parts += _nodes(report.nodes)
    return Group(*parts, *_files(report.files))


def render_stats(stats: TraceStats) -> Group:
    """Return what ``paceline trace stats`` shows."""
    kinds = sorted({kind for rank in stats.ranks for kind in rank.events})
    ranks = [f"rank {rank.rank}" for rank in stats.ranks]
    events = [[f"{rank.events.get(kind, 0):,}" for kind in kinds] for rank in stats.ranks]
    clocks = [
        [
            format_seconds(rank.clock_offset_ns / 1e9),
            f"{rank.clock_drift * 1e6:.2f} ppm",
            format_clock_error(rank.clock_error_ns),
            f"{rank.clock_changes:,}",
            f"{rank.dropped_count:,}",
            "complete" if rank.complete else "truncated",
        ]
        for rank in stats.ranks
    ]
    present = shown_parts(PHASES, [dict(rank.breakdown.items()) for rank in stats.ranks])
    times = [
        [
            *(significant(getattr(rank.breakdown, name)) for name in present),
            significant(rank.loop_wall_s),
        ]
        for rank in stats.ranks
    ]
    labels = [*(phase_label(name) for name in present), "total"]
    heads = ["offset", "drift", "error at most", "changes", "dropped", "file"]
    parts: list[RenderableType] = [
        _table("events", kinds, ranks, events, corner="events"),
        Text(),
        _table("seconds", labels, ranks, times, corner="seconds"),
        Text(),
        _table("clock", heads, ranks, clocks),
    ]
    times_by_rank = [rank.host for rank in stats.ranks]
    loop_s = sum(rank.loop_wall_s for rank in stats.ranks) / max(1, len(stats.ranks))
    parts += _host_work(mean_times(times_by_rank), loop_s, len(stats.ranks))
    if stats.traffic:
        parts += [Text(), _traffic(stats.traffic)]
    parts += _loader(stats.loader)
    parts += _sampled(stats.sampled, loop_s)
    parts += _nodes(stats.nodes)
    parts += _files(stats.files)
    untimed = sum(line.untimed_count for line in stats.traffic)
    for sentence in gap_words(untimed, stats.mismatch_count, stats.violations):
        parts += [Text(), Text(sentence, style="yellow")]
    if stats.mismatches:
        parts += [Text(), _mismatches(stats.mismatches)]
    return Group(*parts)


def _mismatches(mismatches: Iterable[Mismatch]) -> FittingTable:
    rows = []
    for mismatch in mismatches:
        columns = zip(mismatch.ranks, mismatch.operations, mismatch.bytes, strict=True)
        for rank, operation, size in list(columns)[:_ROWS]:
            group = printable(mismatch.group.removeprefix("group "))
            number = f"{mismatch.sequence:,}"
            rows.append((group, printable(operation), number, f"{rank:,}", format_bytes(size)))
    heads = ("mismatch in", "operation", "number", "rank", "size")
    return FittingTable(heads=heads, rows=tuple(rows), names=2)


def _buckets(plan: Plan) -> list[Text]:
    """Return the sizes of gradient buckets, where they are not torch's."""
    sizes = (plan.bucket_bytes, plan.first_bucket_bytes)
    if sizes == (Plan().bucket_bytes, Plan().first_bucket_bytes):
        return []
    size, first = (format_bytes(count) for count in sizes)
    return [Text(f"gradients are reduced in buckets of {size}, the first of {first}")]


def render_estimate(estimate: Estimate) -> Group:
    """Return what ``paceline plan`` shows."""
    low, high = format_seconds(estimate.low_s), format_seconds(estimate.high_s)
    ranks = plural(estimate.plan.mesh.world_size, "rank")
    threads = plural(estimate.plan.threads, "thread")
    present = [(name, seconds) for name, seconds in estimate.breakdown.items() if seconds]
    *predicted, step = seconds_that_add_up([seconds for _, seconds in present])
    rows = [
        (
            phase_label(name),
            printable(estimate.sources.get(name, "")),
            predicted[i],
            format_share(seconds / estimate.step_time_s),
        )
        for i, (name, seconds) in enumerate(present)
    ]
    phases = FittingTable(
        heads=("phase", "rests on", "predicted", "of the step"),
        rows=(*rows, ("step", "", step, "")),
        names=2,
        bold=frozenset([len(rows)]),
    )
    needs = [(name, count) for name, count in estimate.memory_bytes.items() if count]
    memory = _table(
        "memory of a rank",
        ["predicted"],
        [*(printable(name) for name, _ in needs), "together"],
        [
            *([format_bytes(count)] for _, count in needs),
            [format_bytes(sum(estimate.memory_bytes.values()))],
        ],
        bold=[len(needs)],
    )
    return Group(
        Text(
            f"{printable(estimate.workload)}: {format_seconds(estimate.step_time_s)} per step "
            f"({low} to {high}) on {ranks} of {threads}, limited by "
            f"{estimate.limit}",
            style="bold",
        ),
        *_buckets(estimate.plan),
        *render_candidates(estimate),
        *render_stages(estimate),
        Text(),
        phases,
        Text(),
        memory,
        *render_memory_fit(estimate.memory_fit),
        *render_stage_fits(estimate),
    )


def render_calibration(calibration: Calibration) -> Group:
    """Return what ``paceline calibrate`` shows."""
    fits = [fit for fit in calibration.phases if fit.prior_s or fit.measured_s or fit.fitted_s]
    rows = [
        [
            format_seconds(fit.prior_s),
            format_seconds(fit.measured_s),
            format_seconds(fit.fitted_s),
            format_share(fit.weight),
        ]
        for fit in fits
    ]
    step = [
        format_seconds(calibration.prior_step_s),
        format_seconds(calibration.measured_step_s),
        format_seconds(calibration.fitted_step_s),
        "",
    ]
    shown = _table(
        "phase",
        ["before", "measured", "now", "weight of the run"],
        [*(phase_label(fit.name) for fit in fits), "step"],
        [*rows, step],
        bold=[len(fits)],
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


def _phases(report: Report) -> FittingTable:
    late = {straggler.rank for straggler in report.stragglers}
    late_first = sorted(report.rank_phases, key=lambda rank: (rank.rank not in late, rank.rank))
    ranks = sorted(late_first[:_ROWS], key=lambda rank: rank.rank)
    times = [rank.breakdown() for rank in ranks]
    present = shown_parts(PHASES, [dict(spent.items()) for spent in times])
    rows = [
        [
            *shares_that_add_up([getattr(spent, name) for name in present]),
            format_seconds(spent.total_s),
        ]
        for spent in times
    ]
    return _table(
        "share",
        [*(phase_label(name) for name in present), "total"],
        [f"rank {rank.rank}" for rank in ranks],
        rows,
        corner="share",
        bold=[i for i, rank in enumerate(ranks) if rank.rank in late],
    )


def _pipeline(report: Report) -> list[RenderableType]:
    use, bubble = report.pipeline, report.bubble
    if use is None or bubble is None:
        return []
    heads, rows = rank_rows(use)
    shown = rows[:_ROWS]
    causes = cause_rows(use, bubble)
    return [
        Text(),
        FittingTable(heads=("a batch", *heads[1:]), rows=tuple(map(tuple, shown)), names=2),
        Text(),
        _table(
            "idle, all ranks",
            ["of a batch", "of a step"],
            [cause[0] for cause in causes],
            [cause[1:] for cause in causes],
            bold=[len(causes) - 1],
        ),
        Text(),
        Text(transfer_words(use)),
    ]


def _data_nodes(report: Report) -> list[RenderableType]:
    if report.data is None:
        return []
    heads, rows = node_rows(report.data)
    shown = tuple(tuple(map(printable, row)) for row in rows[:_ROWS])
    return [Text(), FittingTable(heads=tuple(heads), rows=shown, names=2)]


def _loader(loader: LoaderCeiling | None) -> list[RenderableType]:
    if loader is None:
        return []
    names, rows = loader_rows(loader)
    return [Text(), _table("loader", LOADER_HEADS, names, rows)]


def _host_work(times: Sequence[HostTime], loop_s: float, ranks: int) -> list[RenderableType]:
    if not times:
        return []
    rows = [
        [
            format_seconds(time.measured_s),
            format_share(time.measured_s / max(loop_s, 1e-12)),
            plural(time.samples, "sample") if time.samples else "timed",
        ]
        for time in times[:_ROWS]
    ]
    names = [printable(time.words) for time in times[:_ROWS]]
    seconds = "mean over ranks" if ranks > 1 else "seconds"
    return [Text(), _table("host work", [seconds, "of the loop", "measured by"], names, rows)]


def _files(files: Sequence[FileUse]) -> list[RenderableType]:
    shown = shown_files(files)[:_ROWS]
    if not shown:
        return []
    names, rows = file_rows(shown)
    return [Text(), _table("files", HEADS, [printable(name) for name in names], rows)]


def _sampled(samples: StepSamples, loop_s: float) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if samples.layers:
        names, rows = layer_rows(samples.layers, _ROWS)
        shown = _table("layer", LAYER_HEADS, [printable(name) for name in names], rows)
        parts += [Text(), shown, Text(), Text(layer_words(samples, loop_s))]
    if samples.operators:
        names, rows = operator_rows(samples.operators, _ROWS)
        cells = tuple((printable(name), *row) for name, row in zip(names, rows, strict=True))
        heads = ("operator", *OPERATOR_HEADS)
        parts += [Text(), FittingTable(heads=heads, rows=cells, names=2)]
    if samples.memory:
        kinds, rows = memory_rows(samples.memory, _ROWS)
        shown = _table("memory", kinds, [row[0] for row in rows], [row[1:] for row in rows])
        parts += [Text(), shown]
    return parts


def _nodes(nodes: Sequence[NodeActivity]) -> list[RenderableType]:
    names, rows = activity_rows(nodes, _ROWS)
    if not names:
        return []
    shown = tuple((printable(name), *cells) for name, cells in zip(names, rows, strict=True))
    return [Text(), FittingTable(heads=("node", *ACTIVITY_HEADS), rows=shown, names=2)]


def _stragglers(report: Report) -> FittingTable:
    shown = report.stragglers[:_ROWS]
    rows = tuple(
        (
            f"rank {late.rank}",
            f"{late.cause.replace('_', ' ')}, {late.shape}",
            f"{late.first_step:,} to {late.last_step:,}",
            f"{significant(late.late_ms)} ms",
            format_share(late.late_share),
            format_share(late.others_wait),
        )
        for late in shown
    )
    heads = ("straggler", "cause", "steps", "typical skew", "late steps", "others wait")
    return FittingTable(heads=heads, rows=rows, names=2)


def _comparison(comparison: Comparison) -> FittingTable:
    phases = shown_phases(comparison)
    *cells, step = shown_cells(comparison)
    error = f"error {format_share(comparison.step_time_error)}"
    return _table(
        "typical step",
        ["predicted", "measured", "ratio"],
        [*(phase_label(phase.name) for phase in phases), "step"],
        [*cells, [*step, error]],
        bold=[len(phases)],
    )


def _traffic(traffic: Iterable[Traffic], report: Report | None = None) -> FittingTable:
    """Return the table of collectives; with a report, beside what its machine's figures give."""
    shown = list(traffic)[:_ROWS]
    modelled = [
        modelled_s(line, report.machine, report.collectives) if report else None for line in shown
    ]
    heads: tuple[str, ...] = (
        "collective",
        "group",
        "path",
        "ranks",
        "size, up to",
        "count",
        "transfer",
        "bandwidth",
    )
    rows: list[tuple[str, ...]] = [
        (
            printable(line.operation),
            printable(line.group.removeprefix("group ")),
            printable(line.path) or "-",
            f"{line.ranks:,}",
            format_size_class(line.size_class_bytes),
            f"{line.count:,}",
            format_seconds(line.transfer_s),
            format_rate(line.bandwidth_bytes_per_s),
        )
        for line in shown
    ]
    if any(seconds is not None for seconds in modelled):  # says more; both do not fit 80 columns
        heads = (*heads[:-1], "modelled")
        rows = [
            (*row[:-1], "-" if seconds is None else format_seconds(seconds))
            for row, seconds in zip(rows, modelled, strict=True)
        ]
    return FittingTable(heads=heads, rows=tuple(rows), names=2)


def _table(
    name: str,
    heads: Sequence[str],
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    corner: str = "",
    bold: Iterable[int] = (),
) -> FittingTable:
    """Return a table whose rows begin with `names`."""
    return FittingTable(
        heads=(name, *heads),
        rows=tuple((first, *cells) for first, cells in zip(names, rows, strict=True)),
        corner=corner,
        bold=frozenset(bold),
    )
