"""How many activations the ranks of a pipeline keep at the same time, from the order alone.

A microbatch is live at a stage from the beginning of its forward until its backward has ended: the
whole one, or ``backward_weight``, which still needs the stage's inputs. As a rank performs one
action after another, the peak depends on its order, and on no timing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.schedules.pipeline.schedule import PipelineSchedule

_ENDS = ("backward", "backward_weight")


def live_microbatches(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return for each stage the most microbatches that are live at the same time.

    Args:
        schedule: correct, see `check_pipeline`.
    """
    live, peak = [0] * schedule.stages, [0] * schedule.stages
    for order in schedule.actions:
        for kind, stage, _ in order:
            if kind == "forward":
                live[stage] += 1
                peak[stage] = max(peak[stage], live[stage])
            elif kind in _ENDS:
                live[stage] -= 1
    return tuple(peak)


def peak_activation_bytes(
    schedule: PipelineSchedule, activation_bytes: Sequence[int]
) -> tuple[int, ...]:
    """Return for each rank the most bytes of activations that it keeps at the same time.

    Less than the sum of its stages' peaks where these are at different times.

    Args:
        schedule: correct, see `check_pipeline`.
        activation_bytes: that each stage saves for the backward of one microbatch, its inputs
            included. Inputs that arrive before their forward begins are not counted.
    """
    peaks = []
    for order in schedule.actions:
        kept = peak = 0
        for kind, stage, _ in order:
            if kind == "forward":
                kept += activation_bytes[stage]
                peak = max(peak, kept)
            elif kind in _ENDS:
                kept -= activation_bytes[stage]
        peaks.append(peak)
    return tuple(peaks)
