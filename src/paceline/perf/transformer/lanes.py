"""Overlaps the collectives of sharded parameters with compute, layer by layer, on two lanes.

A lane does one thing after another: the compute lane passes, the communication lane gathers and
reductions. With ZeRO-3 a layer's pass waits until its parameters are gathered; the gather of the
next layer begins with this layer's pass, so that no more than two layers are whole at the same
time. In the backward pass a layer's gradients are reduced when its pass ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class LaneTask:
    """A layer's pass: parameters gathered before it, compute, gradients reduced after it."""

    gather_s: float
    compute_s: float
    reduce_s: float = 0.0


def pass_s(tasks: Sequence[LaneTask]) -> float:
    """Return the seconds from the first gather to the end of the last pass and reduction.

    Cost: linear in the number of layers.
    """
    if not tasks:
        return 0.0
    lane_s = gathered_s = tasks[0].gather_s
    compute_s = 0.0
    for index, task in enumerate(tasks):
        begin_s = max(compute_s, gathered_s)
        following = tasks[index + 1].gather_s if index + 1 < len(tasks) else 0.0
        if following:
            lane_s = gathered_s = max(lane_s, begin_s) + following
        compute_s = begin_s + task.compute_s
        if task.reduce_s:
            lane_s = max(lane_s, compute_s) + task.reduce_s
    return max(compute_s, lane_s)
