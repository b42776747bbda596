"""What goes where within a memory budget, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from paceline.report.fitting_table import FittingTable
from paceline.report.units import format_bytes, format_rate, format_seconds
from paceline.report.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.core.estimate import Estimate, MemoryFit


def render_memory_fit(found: MemoryFit | None, of: str = "a process") -> list[RenderableType]:
    """Return what goes where within a memory budget of a process or a device."""
    if found is None:
        return []
    actions = ("keep", "recompute", "spill")
    rows = tuple(
        (kind, *(format_bytes(counts.get(action, 0)) for action in actions))
        for kind, counts in found.kinds.items()
    )
    again = f", computed again: {', '.join(found.recomputed)}" if found.recomputed else ""
    return [
        Text(),
        Text(
            f"within {format_bytes(found.budget_bytes)}: peak {format_bytes(found.peak_bytes)} of "
            f"{of} (in core {format_bytes(found.in_core_peak_bytes)}), a step of "
            f"{format_seconds(found.step_s)}, {found.slowdown:.2f} times as long; "
            f"{format_bytes(found.spilled_bytes)} spilled, {format_seconds(found.exposed_s)} of "
            f"the transfers exposed{printable(again)}",
            style="bold",
        ),
        Text(
            f"smallest budget: {format_bytes(found.least_bytes)}; spilled at "
            f"{format_rate(found.disk_bytes_per_s)} ({printable(found.disk_source)})"
        ),
        Text(),
        FittingTable(heads=("tensors", "kept", "recomputed", "spilled"), rows=rows),
    ]


def render_stage_fits(estimate: Estimate) -> list[RenderableType]:
    """Return what goes where on a rank of each stage, within a memory budget."""
    fits = [stage.memory_fit for stage in estimate.stages if stage.memory_fit is not None]
    if not fits:
        return []
    slowdown = estimate.fitted_step_s / estimate.step_time_s
    rows = tuple(
        (
            str(number),
            format_bytes(found.peak_bytes),
            format_bytes(found.in_core_peak_bytes),
            format_bytes(found.least_bytes),
            *(
                format_bytes(found.kinds[kind].get("spill", 0))
                for kind in ("activations", "optimizer state")
            ),
            format_seconds(found.exposed_s),
            f"{found.slowdown:.2f}",
        )
        for number, found in enumerate(fits)
    )
    spilled = ("activations spilled", "optimizer state spilled")
    heads = ("stage", "peak", "in core", "smallest budget", *spilled, "waits for the disk")
    return [
        Text(),
        Text(
            f"within {format_bytes(fits[0].budget_bytes)} of each rank's process: a step of "
            f"{format_seconds(estimate.fitted_step_s)}, {slowdown:.2f} times as long",
            style="bold",
        ),
        Text(f"disk: {format_rate(fits[0].disk_bytes_per_s)} ({printable(fits[0].disk_source)})"),
        Text(),
        FittingTable(heads=(*heads, "times as long"), rows=rows),
    ]
