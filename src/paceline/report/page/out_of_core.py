"""Training out of core: what each rank spilled, and what a step looks like under the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.out_of_core import hidden_s
from paceline.report.page import svg
from paceline.report.page.chart import FIELD, LABEL_X, Chart, render
from paceline.report.page.markup import section, table
from paceline.report.page.times import MAX_ROWS
from paceline.report.units import format_bytes, format_seconds
from paceline.schedules.memory import replay

if TYPE_CHECKING:
    from paceline.report.model import Report
    from paceline.report.out_of_core import PlannedStep

_MEMORY_PX, _ROW_PX, _GAP_PX = 120.0, 16.0, 6.0
_ROWS = ("computes", "writes", "reads")


def transfers(report: Report) -> str:
    """Return what ranks with a memory budget spilled; nothing without one."""
    ranks = [rank for rank in (report.result.ranks if report.result else ()) if rank.memory]
    if not ranks:
        return ""
    rows = []
    for rank in ranks[:MAX_ROWS]:
        memory = rank.memory
        assert memory is not None
        rows.append(
            [
                f"rank {rank.rank}",
                format_bytes(memory.budget_bytes),
                format_bytes(memory.predicted_peak_bytes),
                format_bytes(memory.peak_used_bytes),
                f"{memory.planned_steps:,}",
                format_bytes(memory.spilled_bytes),
                format_seconds(hidden_s(memory)),
                format_seconds(memory.exposed_s),
            ]
        )
    heads = ["rank", "budget", "predicted peak", "measured peak", "steps", "spilled", "hidden"]
    heads.append("exposed")
    note = (
        "Per step under the plan: bytes that are written, and read again; seconds of these "
        "transfers while the rank computes (hidden), and in which it waits for them (exposed). "
        "Budget and peaks are without pages of files, such as those of libraries, which the "
        "section Memory counts."
    )
    parts = [table(heads, rows)]
    if report.planned_step is not None:
        parts.insert(0, render(step_chart(report.planned_step)))
        note += (
            f" The picture is a step of rank {report.planned_step.rank} as its plan has it, with "
            "the rates that the disk has shown."
        )
    return section("Out of core", note, *parts)


def step_chart(step: PlannedStep) -> Chart:
    """Return memory over a step, with and without spilling, and when the disk is busy."""
    planned = step.replayed
    kept = [action._replace(action="keep") for action in step.plan.actions]
    in_core = replay(step.profile, kept, step.tier)
    end = planned.step_s or 1.0
    top = 1.1 * max(planned.peak_bytes, in_core.peak_bytes, step.plan.budget_bytes, 1)
    begins = [interval.begin_s / end * FIELD for interval in planned.intervals]
    marks, labels = _memory_scale(top)
    for replayed, style in ((in_core, "line line-1"), (planned, "line line-0")):
        points = []
        for x, following, interval in zip(
            begins, [*begins[1:], FIELD], replayed.intervals, strict=True
        ):
            y = _MEMORY_PX * (1 - interval.bytes / top)
            points += [(x, y), (following, y)]
        marks.append(svg.polyline(points, style))
    y = _MEMORY_PX * (1 - step.plan.budget_bytes / top)
    marks.append(svg.line(0, y, FIELD, y, "shift"))
    bars: list[tuple[int, float, float, str, str]] = []
    now_s = 0.0
    for interval in planned.intervals:  # it computes until the next event that waits
        if interval.waited_s > 0:
            since_s = interval.begin_s - interval.waited_s
            bars.append((0, now_s, since_s, "forward", "computes"))
            bars.append((0, since_s, interval.begin_s, "waiting", "waits for a transfer"))
            now_s = interval.begin_s
    bars.append((0, now_s, planned.step_s, "forward", "computes"))
    for move in planned.transfers:
        tensor = step.profile.tensors[move.tensor]
        row, phase = (1, "transfer") if move.is_write else (2, "copy")
        title = f"{tensor.name}, {format_bytes(tensor.bytes)}"
        bars.append((row, move.begin_s, move.end_s, phase, title))
    for row, begin_s, end_s, phase, title in bars:
        x, until = max(0.0, begin_s) / end * FIELD, min(end, end_s) / end * FIELD
        if until > x:
            marks.append(
                svg.rect(x, _row_y(row), until - x, _ROW_PX, _style(phase, until - x), title)
            )
    for row, name in enumerate(_ROWS):
        labels.append(svg.text(LABEL_X, _row_y(row) + 12, name, "label", "end"))
    return Chart(
        name="out-of-core",
        title="A step out of core",
        description="Memory over a step, of a step that spills nothing and under the plan, below "
        "the budget; under it when the rank computes and when the disk writes and reads.",
        unit="s",
        end=end,
        height_px=_row_y(len(_ROWS)),
        marks=marks,
        labels=labels,
        legend=[
            (svg.swatch([svg.line(0, 6, 14, 6, "line line-1")]), "memory, nothing spilled"),
            (svg.swatch([svg.line(0, 6, 14, 6, "line line-0")]), "memory under the plan"),
            (svg.swatch([svg.line(0, 6, 14, 6, "shift")]), "budget for tensors"),
            (svg.swatch([svg.rect(0, 0, 14, 12, "phase forward")]), "computes"),
            (svg.swatch([svg.rect(0, 0, 14, 12, "phase waiting")]), "waits"),
            (svg.swatch([svg.rect(0, 0, 14, 12, "phase transfer")]), "writes"),
            (svg.swatch([svg.rect(0, 0, 14, 12, "phase copy")]), "reads"),
        ],
    )


def _style(phase: str, width: float) -> str:
    """Return the class of a bar; the edges of narrow ones would hide them."""
    return f"phase {phase}" if width >= 4 else phase


def _row_y(row: int) -> float:
    return _MEMORY_PX + 2 * _GAP_PX + row * (_ROW_PX + _GAP_PX)


def _memory_scale(top: float) -> tuple[list[str], list[str]]:
    """Return the grid and labels of memory, in binary units."""
    unit = 1 << max(0, (int(top).bit_length() - 1) // 10 * 10)
    grid, labels = [], []
    for at in svg.ticks(top / unit, 4):
        y = _MEMORY_PX * (1 - at * unit / top)
        grid.append(svg.line(0, y, FIELD, y, "grid"))
        labels.append(svg.text(LABEL_X, y + 4, format_bytes(at * unit), "tick", "end"))
    return grid, labels
