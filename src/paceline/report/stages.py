"""A plan's stages, and the plans that were compared with it, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from paceline.report.fitting_table import FittingTable
from paceline.report.units import format_bytes, format_seconds, format_share, plural
from paceline.report.words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.core.estimate import Estimate
    from paceline.core.plan import Mesh


def mesh_words(mesh: Mesh) -> str:
    """Return a mesh in words: ``2 stages x 2 replicas``."""
    replicas = plural(mesh.data, "replica")
    return replicas if mesh.pipeline == 1 else f"{plural(mesh.pipeline, 'stage')} x {replicas}"


def render_candidates(estimate: Estimate) -> list[RenderableType]:
    """Return the plans that were compared, and why the first one was chosen; empty if none were."""
    if not estimate.candidates:
        return []
    first, *others = estimate.candidates
    rows = tuple(
        (
            mesh_words(candidate.mesh),
            str(candidate.microbatches) if candidate.mesh.pipeline > 1 else "-",
            format_seconds(candidate.step_time_s),
            f"{candidate.samples_per_s:.4g}",
            format_bytes(candidate.memory_bytes) + ("" if candidate.fits else ", does not fit"),
            candidate.limit,
        )
        for candidate in estimate.candidates
    )
    other = next(
        (other for other in others if other.mesh.pipeline == 1), others[0] if others else None
    )
    faster = ""
    if other is not None:
        ratio = other.step_time_s / first.step_time_s
        what = "data parallelism" if other.mesh.pipeline == 1 else mesh_words(other.mesh)
        faster = f", {ratio:.2f} times as fast as {what}, limited by {other.limit}"
        if not other.fits:
            faster += ", which does not fit"
    said = (
        f"chosen of {len(rows)} plans for {plural(first.batch, 'sample')} a step: "
        f"{mesh_words(first.mesh)}{faster}"
    )
    heads = ("plan", "microbatches", "step", "samples/s", "memory of a rank", "limited by")
    table = FittingTable(heads=heads, rows=rows, bold=frozenset([0]))
    return [Text(), Text(said), Text(), table]


def render_stages(estimate: Estimate) -> list[RenderableType]:
    """Return the stages of a pipeline; empty without one."""
    if not estimate.stages:
        return []
    plan = estimate.plan
    rows = tuple(
        (
            str(number),
            f"{stage.layers}, {printable(stage.first)} to {printable(stage.last)}",
            format_bytes(stage.parameter_bytes),
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            str(stage.live_microbatches),
            format_bytes(stage.memory_bytes),
        )
        for number, stage in enumerate(estimate.stages)
    )
    count = plan.microbatch_count
    said = (
        f"{mesh_words(plan.mesh)}, {count} {'microbatch' if count == 1 else 'microbatches'}, "
        f"schedule {plan.schedule}: ranks idle for {format_share(estimate.bubble_share)} of the "
        "time of the passes"
    )
    heads = ("stage", "layers", "parameters", "forward", "backward", "live", "memory of a rank")
    return [Text(), Text(said), Text(), FittingTable(heads=heads, rows=rows)]
