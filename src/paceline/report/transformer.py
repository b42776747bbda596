"""The Estimate of a transformer for a terminal: time, limit, memory of the fullest rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.report.fitting_table import FittingTable
from paceline.report.memory_fit import render_memory_fit
from paceline.report.units import (
    format_bytes,
    format_seconds,
    format_share,
    plural,
    seconds_that_add_up,
)
from paceline.report.words import phase_label, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.core.estimate import Estimate
    from paceline.core.plan import Mesh


def render_transformer(estimate: Estimate, flops_per_sample: float) -> Group:
    """Return what ``paceline plan --model`` shows.

    Args:
        estimate: of the step.
        flops_per_sample: of the model, nothing computed twice.
    """
    mesh = estimate.plan.mesh
    low, high = format_seconds(estimate.low_s), format_seconds(estimate.high_s)
    samples = plural(estimate.batch, "sample")
    ranks, nodes = plural(mesh.world_size, "rank"), plural(estimate.plan.nodes, "node")
    step = f"{format_seconds(estimate.step_time_s)} per step of {samples}"
    shape = mesh_in_words(mesh)
    rate = flops_per_sample * estimate.batch / estimate.step_time_s / mesh.world_size
    lines: list[RenderableType] = [
        Text(
            f"{printable(estimate.workload)} on {printable(estimate.machine)}: "
            f"{step} ({low} to {high}, 90 %), "
            f"limited by {estimate.limit}",
            style="bold",
        ),
        Text(
            f"{ranks} on {nodes} ({shape}), "
            f"microbatches of a replica: {estimate.plan.microbatch_count:,}; "
            f"{rate / 1e12:.0f} TFLOP/s per rank"
        ),
        Text(),
        _phases(estimate),
        Text(),
        _memory(estimate),
        Text(),
        _shares(estimate),
        Text(),
        _traffic(estimate),
        *render_memory_fit(estimate.memory_fit, of="a device"),
        *_failures(estimate),
        Text(),
    ]
    return Group(*lines)


def mesh_in_words(mesh: Mesh) -> str:
    """Return the axes of a mesh that have several ranks."""
    axes = ((mesh.data, "data"), (mesh.tensor, "tensor"), (mesh.pipeline, "pipeline"),
            (mesh.context, "context"))  # fmt: skip
    return " x ".join(f"{count} {name}" for count, name in axes if count > 1) or "1 rank"


def _phases(estimate: Estimate) -> FittingTable:
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
    return FittingTable(
        heads=("phase", "rests on", "predicted", "of the step"),
        rows=(*rows, ("step", "", step, "")),
        names=2,
        bold=frozenset([len(rows)]),
    )


def _memory(estimate: Estimate) -> FittingTable:
    pipeline = estimate.plan.mesh.pipeline
    where = (
        f"memory of pipeline rank {estimate.fullest_rank}" if pipeline > 1 else "memory of a rank"
    )
    rows = [(printable(kind), format_bytes(size)) for kind, size in estimate.memory_bytes.items()]
    total = ("together", format_bytes(estimate.needed_memory_bytes))
    capacity = ("of the device", format_bytes(estimate.available_memory_bytes))
    return FittingTable(
        heads=(where, "predicted"), rows=(*rows, total, capacity), bold=frozenset([len(rows)])
    )


def _shares(estimate: Estimate) -> FittingTable:
    shares = sorted(estimate.shares.items(), key=lambda item: -item[1])
    rows = tuple((printable(name), format_share(share)) for name, share in shares if share)
    return FittingTable(heads=("a faster one would help", "share of the step"), rows=rows)


def _traffic(estimate: Estimate) -> FittingTable:
    rows = tuple(
        (printable(level), format_bytes(size)) for level, size in estimate.link_bytes.items()
    )
    return FittingTable(heads=("a rank sends over", "per step"), rows=rows)


def _failures(estimate: Estimate) -> list[Text]:
    if not estimate.checkpoint_interval_s:
        return []
    interval = format_seconds(estimate.checkpoint_interval_s)
    useful = format_share(estimate.useful_share)
    return [
        Text(),
        Text(f"a checkpoint every {interval} loses least: {useful} of the time remain"),
    ]
