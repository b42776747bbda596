"""The parts of the HTML report, each from the `Report` to markup.

Each chart has its numbers in a folded table, for those who can't or won't read them from a drawing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.report import charts
from paceline.report.markup import Html, details, figures, section, table
from paceline.report.model import modelled_s
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
from paceline.report.words import STEP_RULES
from paceline.trace.analysis.blame import BlameRules
from paceline.trace.merge.steps import StepRule

if TYPE_CHECKING:
    from paceline.core.machine import Rate
    from paceline.report.model import Report
    from paceline.trace.analysis.phases import RankPhases

_MAX_ROWS = 128


def key_figures(report: Report) -> str:
    """Return the run in a handful of numbers."""
    total = report.total
    wall_s = total.total_s
    low, high = _step_range_s(report)
    spread = f"{format_seconds(low, 2)} to {format_seconds(high, 2)} in 9 of 10 steps"
    items = [
        ("Step time", format_seconds(report.step_time_s), spread if report.steps else "no step"),
        ("Ranks", f"{report.world_size:,}", _missing_words(report)),
        ("Steps", f"{report.steps:,}", f"in {format_seconds(wall_s)} of training loop"),
    ]
    if report.world_size > 1:
        waiting, transfer = total.waiting / max(wall_s, 1e-12), total.transfer / max(wall_s, 1e-12)
        items.append(("Waiting", format_share(waiting), "of the loop, for ranks that come later"))
        items.append(("Moving data", format_share(transfer), "of the loop, not hidden by compute"))
    memory = format_bytes(report.peak_memory_bytes)
    items.append(("Peak memory", memory, "resident, the largest rank"))
    error = report.comparison.step_time_error
    if report.comparison.predicted_step_s is not None:
        predicted = format_seconds(report.comparison.predicted_step_s)
        items.append(("Prediction error", format_share(error), f"{predicted} predicted"))
    return figures(items)


def _step_range_s(report: Report) -> tuple[float, float]:
    if not report.steps:
        return 0.0, 0.0
    slowest = np.max([rank.step_s[: report.steps] for rank in report.rank_phases], axis=0)
    low, high = np.percentile(slowest, [5, 95])
    return float(low), float(high)


def _missing_words(report: Report) -> str:
    missing = report.missing_ranks
    return f"{plural(len(missing), 'rank')} left no trace" if missing else "all left a trace"


def time_by_phase(report: Report) -> str:
    """Return where each rank's time went."""
    shown = _shown_parts(report)
    times = [rank.breakdown() for rank in shown]
    present = [name for name in PHASES if any(getattr(spent, name) > 0 for spent in times)]
    rows = [
        [
            f"rank {rank.rank}",
            *(_seconds_and_share(getattr(spent, name), spent.total_s) for name in present),
            format_seconds(spent.total_s),
        ]
        for rank, spent in zip(shown, times, strict=True)
    ]
    note = (
        "The training loop of each rank, from its first phase to the end of its last step. Phases "
        "exclude each other. Waiting is time inside a collective before the last rank entered, "
        "transfer is the time after that; communication that overlaps with computation is in "
        "neither."
    )
    if len(shown) < len(report.rank_phases):
        note += (
            f" {len(shown)} of {len(report.rank_phases)} ranks are shown, the late ones among them."
        )
    chart = charts.time_bars([rank.rank for rank in shown], times)
    numbers = details("Numbers", table(["rank", *present, "loop"], rows))
    return section("Time by phase", note, charts.legend(present), chart, numbers)


def _shown_parts(report: Report) -> list[RankPhases]:
    """Return at most `charts.ROWS` ranks: spread over all of them, and those that were late."""
    count = len(report.rank_phases)
    if count <= charts.ROWS:
        return list(report.rank_phases)
    late = {straggler.rank for straggler in report.stragglers[: charts.ROWS // 2]}
    spread = charts.blocks(count, charts.ROWS - len(late))[:-1].tolist()
    return [rank for i, rank in enumerate(report.rank_phases) if i in spread or rank.rank in late]


def _seconds_and_share(seconds: float, total_s: float) -> str:
    if seconds == 0:
        return "0"
    return f"{format_seconds(seconds)} ({format_share(seconds / max(total_s, 1e-12))})"


def skew(report: Report) -> str:
    """Return how late each rank was in each step."""
    if report.world_size < 2 or not report.steps:
        return ""
    floor_s = max(
        BlameRules().min_late_s, BlameRules().min_late_share * report.comparison.measured_step_s
    )
    top_s = charts.skew_scale_s(report.skew_s, report.stragglers, floor_s)
    ranks = [rank.rank for rank in report.rank_phases]
    note = (
        "How much longer than the fastest rank each rank took from one synchronising collective of "
        "the step to the next; time spent waiting for other ranks is not counted. "
    )
    if report.stragglers:
        note += "Frames mark the steps for which a rank is blamed. "
    if report.steps > charts.COLUMNS:
        each = -(-report.steps // charts.COLUMNS)
        note += f"A column shows the worst of up to {plural(each, 'step')}. "
    if len(ranks) > charts.ROWS:
        note += f"A row shows the worst of up to {plural(-(-len(ranks) // charts.ROWS), 'rank')}. "
    skew_ms = report.skew_s * 1e3
    order = np.argsort(-skew_ms.sum(axis=1), kind="stable")[:_MAX_ROWS]
    rows = [
        [
            f"rank {ranks[i]}",
            f"{significant(float(np.median(skew_ms[i])))} ms",
            f"{significant(float(np.percentile(skew_ms[i], 95)))} ms",
            f"{significant(float(skew_ms[i].max()))} ms",
            f"{int(skew_ms[i].argmax()):,}",
        ]
        for i in order.tolist()
    ]
    heads = ["rank", "median", "95th percentile", "largest", "in step"]
    return section(
        "Skew",
        note,
        charts.skew_key(top_s),
        charts.skew_map(report.skew_s, ranks, report.stragglers, top_s),
        _blamed(report),
        details("Numbers", table(heads, rows)),
    )


def _blamed(report: Report) -> str:
    if not report.stragglers:
        return ""
    rows = [
        [
            f"rank {late.rank}",
            late.cause.replace("_", " "),
            f"{late.first_step:,} to {late.last_step:,}",
            f"{significant(late.late_ms)} ms",
            format_share(late.others_wait),
        ]
        for late in report.stragglers[:_MAX_ROWS]
    ]
    heads = ["late", "cause", "steps", "typical skew", "others wait, of these steps"]
    return table(heads, rows, names=2)


def step_times(report: Report) -> str:
    """Return how step time went over the run."""
    if not report.steps:
        return ""
    times = np.array([rank.step_s[: report.steps] for rank in report.rank_phases])
    ranks = [rank.rank for rank in report.rank_phases]
    note = STEP_RULES[StepRule(report.trace.step_rule)]
    if len(ranks) > 8:
        note += " The line is the median of the ranks, the band their range."
    if report.steps > charts.COLUMNS:
        note += " Each point is the longest of its steps."
    rows = [
        [
            f"rank {rank}",
            *(format_seconds(float(v)) for v in np.percentile(times[i], [0, 50, 95, 100])),
        ]
        for i, rank in enumerate(ranks[:_MAX_ROWS])
    ]
    numbers = details("Numbers", table(["rank", "fastest", "median", "95 %", "slowest"], rows))
    return section("Step time", note, charts.step_lines(times, ranks), numbers)


def collectives(report: Report) -> str:
    """Return what was communicated and how fast, beside what the machine promises."""
    if not report.traffic:
        return ""
    rows = []
    for line in report.traffic[:_MAX_ROWS]:
        model_s = modelled_s(line, report.machine)
        promised = line.typical_bytes / model_s if model_s and line.typical_bytes else None
        achieved = line.bandwidth_bytes_per_s
        rows.append(
            [
                line.operation,
                line.group.removeprefix("group "),
                f"{line.ranks:,}",
                format_size_class(line.size_class_bytes),
                f"{line.count:,}",
                format_bytes(line.bytes),
                format_seconds(line.spread_s),
                format_seconds(line.transfer_s),
                format_seconds(model_s),
                format_rate(achieved),
                format_rate(promised),
            ]
        )
    note = (
        "Transfer is the median time from the arrival of the last rank to the last completion; "
        "arrival is the median time between the first and the last rank. Bandwidth is bytes that "
        "one rank gives, over transfer. The model is the machine's measured latency and bandwidth "
        "of this operation; '-' where it has none."
    )
    heads = ["operation", "group", "ranks", "size", "count", "bytes per rank", "arrival"]
    heads += ["transfer", "modelled", "bandwidth", "modelled"]
    return section("Collectives", note, table(heads, rows, names=2))


def memory(report: Report) -> str:
    """Return predicted memory by kind beside what was measured."""
    measured = [
        (rank.rank, rank.status.peak_memory_bytes)
        for rank in sorted(report.trace.ranks, key=lambda rank: -rank.status.peak_memory_bytes)
    ]
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
    rows = [[f"rank {rank}", format_bytes(peak)] for rank, peak in measured[:_MAX_ROWS]]
    peaks = table(["measured peak, resident", "bytes"], rows)
    parts.append(peaks if len(rows) <= 8 else details(f"{plural(len(rows), 'rank')}", peaks))
    return section("Memory", note, f'<div class="pairs">{"".join(parts)}</div>')


def prediction(report: Report) -> str:
    """Return the undisturbed step, predicted and measured."""
    comparison = report.comparison
    if not comparison.undisturbed_steps:
        return section("Prediction beside measurement", "No step was undisturbed.")
    note = (
        f"A typical undisturbed step: {comparison.undisturbed_steps:,} of "
        f"{plural(comparison.steps, 'step')}, those after the warm-up and outside every "
        "straggler's window. Each phase is the median over steps, then the mean over ranks; the "
        "step is that of the slowest rank. "
    )
    if comparison.unfit:
        note += f"Only the measurement is shown, since {comparison.unfit}."
    elif comparison.predicted_step_s is None:
        note += (
            "The run was not predicted (paceline plan --out, paceline run --plan), so only the "
            "measurement is shown."
        )
    else:
        note += "Ratio is predicted over measured. Upper bar: predicted; lower bar: measured."
    top_s = max(max(phase.predicted_s or 0.0, phase.measured_s) for phase in comparison.phases)
    rows: list[list[object]] = [
        [
            phase.name,
            Html(charts.pair_bar(phase.predicted_s, phase.measured_s, top_s)),
            format_seconds(phase.predicted_s),
            format_seconds(phase.measured_s),
            "-" if phase.ratio is None else f"{phase.ratio:.2f}",
        ]
        for phase in comparison.phases
        if phase.measured_s > 0 or phase.predicted_s
    ]
    ratio = None if comparison.step_time_error is None else comparison.predicted_step_s
    rows.append(
        [
            "step",
            "",
            format_seconds(comparison.predicted_step_s),
            format_seconds(comparison.measured_step_s),
            "-" if ratio is None else f"{ratio / comparison.measured_step_s:.2f}",
        ]
    )
    heads = ["phase", "", "predicted", "measured", "ratio"]
    limit = _limit(report)
    return section(
        "Prediction beside measurement", note, table(heads, rows, names=2, total=True), limit
    )


def _limit(report: Report) -> str:
    known = report.estimate
    if known is None:
        return ""
    rows = [
        [name, format_share(share)]
        for name, share in sorted(known.shares.items(), key=lambda item: -item[1])
    ]
    interval = f"{format_seconds(known.low_s)} to {format_seconds(known.high_s)}"
    summary = f"Expected step time {interval}; predicted to be limited by {known.limit}"
    return details(summary, table(["resource", "share of the predicted step"], rows))


def provenance(report: Report) -> str:
    """Return what the numbers rest on."""
    config = report.config
    script = " ".join([str(config.get("script", "-")), *map(str, config.get("args", []))])
    rows: list[list[object]] = [["run", report.run], ["script", script]]
    rows += [
        [name, "not installed" if value is None else value]
        for name, value in report.versions.items()
        if name != "version"
    ]
    values = config.get("values", {})
    settings = [
        [name, json.dumps(setting.get("value")), setting.get("provenance")]
        for name, setting in (values.items() if isinstance(values, dict) else ())
        if isinstance(setting, dict)
    ]
    known = [table(["what", "value"], rows, names=2)]
    if settings:
        known.append(table(["setting", "value", "provenance"], settings, names=3))
    parts = [f'<div class="pairs">{"".join(known)}</div>', _machine(report)]
    parts.append(_clocks(report))
    return section("Provenance", "", *parts)


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
            f"{cost.backend} {cost.operation}",
            f"{format_seconds(cost.points[0].seconds.value)} to "
            f"{format_seconds(cost.points[-1].seconds.value)} for "
            f"{format_bytes(cost.points[-1].bytes)}",
            f"{cost.ranks} ranks, {cost.points[0].seconds.source}",
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
            f"{rank.status.recorded_count:,}",
            f"{rank.status.dropped_count:,}",
            "complete" if rank.complete else "truncated",
        ]
        for i, rank in enumerate(report.trace.ranks[:_MAX_ROWS])
    ]
    heads = ["trace", "clock offset", "drift", "error at most", "events", "dropped", "file"]
    note = ""
    if any(clock.error_ns is None for clock in report.trace.clocks):
        note = (
            "No collective bounds the clocks whose error is unknown, or one of them was set during "
            "the run: skew and waiting between these nodes may be wrong by as much. "
        )
    return details("Traces and clocks", f"<p>{note}</p>" * bool(note) + table(heads, rows))
