"""What some steps show, as rows of tables: layers, operators, and memory by what holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.units import format_bytes, format_seconds, format_share, plural, significant
from paceline.trace.format.events import MEMORY_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.sampled import HeldMemory, LayerTime, ProfiledOperator, StepSamples

LAYER_HEADS = ("forward", "self", "gradients ready", "gradients")
OPERATOR_HEADS = ("on", "calls", "total", "self")


def layer_rows(layers: Sequence[LayerTime], most: int) -> tuple[list[str], list[list[str]]]:
    """Return names and cells of a table of layers under `LAYER_HEADS`.

    Args:
        layers: in the order of a step.
        most: rows; those with the longest self time, in the order of a step.
    """
    longest = sorted(layers, key=lambda layer: -layer.self_s)[:most]
    shown = [layer for layer in layers if layer in longest]
    cells = [
        [
            format_seconds(layer.forward_s) if layer.calls else "-",
            format_seconds(layer.self_s) if layer.calls else "-",
            "-" if layer.ready_s is None else f"after {format_seconds(layer.ready_s)}",
            format_bytes(layer.gradient_bytes) if layer.gradient_bytes else "-",
        ]
        for layer in shown
    ]
    return [layer.name for layer in shown], cells


def layer_words(samples: StepSamples, loop_s: float) -> str:
    """Return what the figures of layers rest on; empty without any.

    Args:
        samples: of the run.
        loop_s: of a rank, the mean over ranks.
    """
    if not samples.layers:
        return ""
    steps = plural(max(layer.steps for layer in samples.layers), "sampled step")
    share = format_share(samples.cost_s / loop_s) if loop_s else "an unknown share"
    return (
        f"Means of {steps} of all ranks, for each step: the forward pass of each layer by the "
        "host's clock, its own part without the layers within it, and how long after the begin of "
        "the backward pass the last of its gradients was ready. Layers within compiled code are "
        f"not timed. Sampling took {share} of the loop."
    )


def operator_rows(
    operators: Sequence[ProfiledOperator], most: int
) -> tuple[list[str], list[list[str]]]:
    """Return names and cells of a table of operators under `OPERATOR_HEADS`."""
    shown = operators[:most]
    cells = [
        [
            row.device,
            significant(row.calls),
            format_seconds(row.total_s),
            format_seconds(row.self_s),
        ]
        for row in shown
    ]
    return [row.name for row in shown], cells


def memory_rows(memory: Sequence[HeldMemory], most: int) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of memory by what holds it: a row per rank."""
    kinds = [kind for kind in MEMORY_KINDS if any(kind in held.held_bytes for held in memory)]
    rows = [
        [
            f"rank {held.rank}",
            *(format_bytes(held.held_bytes.get(kind)) for kind in kinds),
            format_bytes(held.host_bytes or None),
        ]
        for held in memory[:most]
    ]
    return [*kinds, "resident, anonymous"], rows
