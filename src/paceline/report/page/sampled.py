"""What some steps show: the layers of the model, operators, memory by what holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.page.markup import details, section, table
from paceline.report.sampled import (
    LAYER_HEADS,
    OPERATOR_HEADS,
    layer_rows,
    layer_words,
    memory_rows,
    operator_rows,
)
from paceline.report.units import plural

if TYPE_CHECKING:
    from paceline.report.model import Report

_MOST, _OPEN = 64, 16  # rows, and as many are shown without a click


def layers(report: Report) -> str:
    """Return the times of layers and operators; nothing where no step was sampled."""
    samples = report.sampled
    parts = []
    if samples.layers:
        names, cells = layer_rows(samples.layers, _MOST)
        rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
        shown = table(["layer", *LAYER_HEADS], rows)
        parts.append(shown if len(rows) <= _OPEN else details(plural(len(rows), "layer"), shown))
    if samples.operators:
        names, cells = operator_rows(samples.operators, _MOST)
        rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
        steps = plural(samples.operators[0].steps, "profiled step")
        shown = table(["operator or kernel", *OPERATOR_HEADS], rows, names=2)
        parts.append(details(f"Operators and kernels, means of {steps}", shown))
    if not parts:
        return ""
    return section("Layers", layer_words(samples, report.total.total_s), *parts)


def memory_table(report: Report) -> str:
    """Return what held the memory of each rank; nothing where it was not counted."""
    if not report.sampled.memory:
        return ""
    heads, rows = memory_rows(report.sampled.memory, _MOST)
    return table(["held by", *heads], rows)
