"""Pipeline parallelism as plain data: which rank computes which stage when.

Generators are pure functions to a `PipelineSchedule`. The runtime of `paceline.training` executes
it on the ranks, so that what was checked and predicted is what runs.

    generator                    stages per rank    backward
    fill_drain                   1                  whole
    one_forward_one_backward     1                  whole
"""

from paceline.schedules.pipeline.orders import fill_drain, one_forward_one_backward
from paceline.schedules.pipeline.schedule import (
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    StageEdge,
)

__all__ = [
    "ActionKind",
    "PipelineAction",
    "PipelineSchedule",
    "StageEdge",
    "fill_drain",
    "one_forward_one_backward",
]
