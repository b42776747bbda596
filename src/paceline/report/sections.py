"""The parts of the HTML report, each from the `Report` to a piece of markup.

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
from paceline.trace.blame import BlameRules

if TYPE_CHECKING:
    from paceline.core.machine import Rate
    from paceline.report.model import Report
    from paceline.trace.phases import RankPhases

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
    slowest = np.max([one.step_s[: report.steps] for one in report.parts], axis=0)
    low, high = np.percentile(slowest, [5, 95])
    return float(low), float(high)


def _missing_words(report: Report) -> str:
    missing = report.missing_ranks
    return f"{plural(len(missing), 'rank')} left no trace" if missing else "all left a trace"


def time_by_phase(report: Report) -> str:
    """Return where each rank's time went."""
    shown = _shown_parts(report)
    times = [one.breakdown() for one in shown]
    present = [name for name in PHASES if any(getattr(one, name) > 0 for one in times)]
    rows = [
        [
            f"rank {part.rank}",
            *(_seconds_and_share(getattr(one, name), one.total_s) for name in present),
            format_seconds(one.total_s),
        ]
        for part, one in zip(shown, times, strict=True)
    ]
    note = (
        "The training loop of each rank, from its first phase to the end of its last step. Phases "
        "exclude each other. Waiting is time inside a collective before the last rank came, "
        "transfer is the time after that; what runs behind compute is in neither."
    )
    if len(shown) < len(report.parts):
        note += f" {len(shown)} of {len(report.parts)} ranks are shown, the late ones among them."
    chart = charts.time_bars([one.rank for one in shown], times)
    numbers = details("Numbers", table(["rank", *present, "loop"], rows))
    return section("Time by phase", note, charts.legend(present), chart, numbers)


def _shown_parts(report: Report) -> list[RankPhases]:
    """Return at most `charts.ROWS` ranks: spread over all of them, and those that were late."""
    count = len(report.parts)
    if count <= charts.ROWS:
        return list(report.parts)
    late = {one.rank for one in report.stragglers[: charts.ROWS // 2]}
    spread = charts.blocks(count, charts.ROWS - len(late))[:-1].tolist()
    return [one for i, one in enumerate(report.parts) if i in spread or one.rank in late]


def _seconds_and_share(seconds: float, total_s: float) -> str:
    if seconds == 0:
        return "0"
    return f"{format_seconds(seconds)} ({format_share(seconds / max(total_s, 1e-12))})"


def lateness(report: Report) -> str:
    """Return who was late when."""
    if report.world_size < 2 or not report.steps:
        return ""
    floor_s = max(
        BlameRules().min_late_s, BlameRules().min_late_share * report.comparison.measured_step_s
    )
    top_s = charts.late_scale_s(report.late_s, report.stragglers, floor_s)
    ranks = [one.rank for one in report.parts]
    note = (
        "How much later than the fastest rank each rank came to the step's collectives, by its own "
        "doing: what it spent waiting for others is taken off. "
    )
    if report.stragglers:
        note += "Frames mark the steps for which a rank is blamed. "
    if report.steps > charts.COLUMNS:
        each = -(-report.steps // charts.COLUMNS)
        note += f"A column shows the worst of up to {plural(each, 'step')}. "
    if len(ranks) > charts.ROWS:
        note += f"A row shows the worst of up to {plural(-(-len(ranks) // charts.ROWS), 'rank')}. "
    late_ms = report.late_s * 1e3
    order = np.argsort(-late_ms.sum(axis=1), kind="stable")[:_MAX_ROWS]
    rows = [
        [
            f"rank {ranks[i]}",
            f"{significant(float(np.median(late_ms[i])))} ms",
            f"{significant(float(np.percentile(late_ms[i], 95)))} ms",
            f"{significant(float(late_ms[i].max()))} ms",
            f"{int(late_ms[i].argmax()):,}",
        ]
        for i in order.tolist()
    ]
    heads = ["rank", "median", "95th percentile", "largest", "in step"]
    return section(
        "Lateness",
        note,
        charts.late_key(top_s),
        charts.late_map(report.late_s, ranks, report.stragglers, top_s),
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
    heads = ["late", "cause", "steps", "typical lateness", "others wait, of these steps"]
    return table(heads, rows, names=2)


def step_times(report: Report) -> str:
    """Return how step time went over the run."""
    if not report.steps:
        return ""
    times = np.array([one.step_s[: report.steps] for one in report.parts])
    ranks = [one.rank for one in report.parts]
    note = "From the end of one optimizer step to the end of the next."
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
    for one in report.traffic[:_MAX_ROWS]:
        model_s = modelled_s(one, report.machine)
        promised = one.typical_bytes / model_s if model_s and one.typical_bytes else None
        achieved = one.bandwidth_bytes_per_s
        rows.append(
            [
                one.operation,
                one.group.removeprefix("group "),
                f"{one.ranks:,}",
                format_size_class(one.size_class_bytes),
                f"{one.count:,}",
                format_bytes(one.bytes),
                format_seconds(one.spread_s),
                format_seconds(one.transfer_s),
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
        (one.rank, one.status.peak_memory_bytes)
        for one in sorted(report.trace.ranks, key=lambda one: -one.status.peak_memory_bytes)
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
    found = report.comparison
    if not found.undisturbed_steps:
        return section("Prediction beside measurement", "No step was undisturbed.")
    note = (
        f"A typical undisturbed step: {found.undisturbed_steps:,} of {plural(found.steps, 'step')}"
        ", those after the warm-up and outside every late rank's window. Each phase is the median "
        "over steps, then the mean over ranks; the step is that of the slowest rank. "
    )
    if found.unfit:
        note += f"Only the measurement is shown, since {found.unfit}."
    elif found.predicted_step_s is None:
        note += (
            "The run was not predicted (paceline plan --out, paceline run --plan), so only the "
            "measurement is shown."
        )
    else:
        note += "Ratio is predicted over measured. Upper bar: predicted; lower bar: measured."
    top_s = max(max(one.predicted_s or 0.0, one.measured_s) for one in found.phases)
    rows: list[list[object]] = [
        [
            one.name,
            Html(charts.pair_bar(one.predicted_s, one.measured_s, top_s)),
            format_seconds(one.predicted_s),
            format_seconds(one.measured_s),
            "-" if one.ratio is None else f"{one.ratio:.2f}",
        ]
        for one in found.phases
        if one.measured_s > 0 or one.predicted_s
    ]
    ratio = None if found.step_time_error is None else found.predicted_step_s
    rows.append(
        [
            "step",
            "",
            format_seconds(found.predicted_step_s),
            format_seconds(found.measured_step_s),
            "-" if ratio is None else f"{ratio / found.measured_step_s:.2f}",
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
    told = f"Expected step time {interval}; predicted to be limited by {known.limit}"
    return details(told, table(["resource", "share of the predicted step"], rows))


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
        [name, json.dumps(one.get("value")), one.get("origin")]
        for name, one in (values.items() if isinstance(values, dict) else ())
        if isinstance(one, dict)
    ]
    known = [table(["what", "value"], rows, names=2)]
    if settings:
        known.append(table(["setting", "value", "origin"], settings, names=3))
    parts = [f'<div class="pairs">{"".join(known)}</div>', _machine(report)]
    parts.append(_clocks(report))
    return section("Provenance", "", *parts)


def _machine(report: Report) -> str:
    machine = report.machine
    if machine is None:
        return ""
    rows = [["machine", machine.name, plural(machine.nodes, "node")]]
    rows += [
        [f"device {i}", one.name, f"{plural(one.cores, 'core')}, {_sources(one.rates)}"]
        for i, one in enumerate(machine.devices)
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
    rows += [["missing", one, ""] for one in machine.missing]
    return table(["machine", "value", "source"], rows, names=3)


def _sources(rates: tuple[Rate, ...]) -> str:
    sources = sorted({one.source for one in rates})
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
            "whole" if rank.complete else "ends early",
        ]
        for i, rank in enumerate(report.trace.ranks[:_MAX_ROWS])
    ]
    heads = ["trace", "clock offset", "drift", "error at most", "events", "dropped", "file"]
    note = ""
    if any(clock.error_ns is None for clock in report.trace.clocks):
        note = (
            "No collective bounds the clocks whose error is unknown, or one of them was set during "
            "the run: lateness and waiting between these nodes may be wrong by as much. "
        )
    return details("Traces and clocks", f"<p>{note}</p>" * bool(note) + table(heads, rows))
