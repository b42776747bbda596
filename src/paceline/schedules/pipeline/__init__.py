"""Pipeline parallelism as plain data: which rank computes which stage when.

Generators are pure functions to a `PipelineSchedule`; `check_pipeline` proves that it computes the
batch without deadlock and within memory; `replay` predicts when each action runs; the runtime of
`paceline.training` executes it. All read the same data, so prediction and execution cannot differ
in the order.

    generator                    stages per rank    backward    live microbatches at a stage
    fill_drain                   1                  whole       all
    one_forward_one_backward     1                  whole       at most one per later stage, and 1
    interleaved                  1 or more          whole       about the stages of two passes
    zero_bubble                  1                  split       at most one per stage

`partition` cuts the layers of a model into stages.
"""

from collections.abc import Callable

from paceline.core.plan import PipelineChoice
from paceline.core.workload import LayerEdge
from paceline.schedules.pipeline.check import check_pipeline
from paceline.schedules.pipeline.costs import StageCosts
from paceline.schedules.pipeline.interleaved import interleaved
from paceline.schedules.pipeline.layers import LayerCosts, stage_costs, stage_edges
from paceline.schedules.pipeline.live import live_microbatches, peak_activation_bytes
from paceline.schedules.pipeline.orders import fill_drain, one_forward_one_backward
from paceline.schedules.pipeline.partition import StagePartition, partition
from paceline.schedules.pipeline.replay import PipelineReplay, replay
from paceline.schedules.pipeline.schedule import (
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    StageEdge,
)
from paceline.schedules.pipeline.step import PipelineEnds, fastest_partition, pipeline_ends
from paceline.schedules.pipeline.zero_bubble import zero_bubble

# Orders with one stage on each rank, by their names in plans.
ORDERS: dict[PipelineChoice, Callable[[int, int], PipelineSchedule]] = {
    "1f1b": one_forward_one_backward,
    "fill_drain": fill_drain,
    "zero_bubble": zero_bubble,
}

__all__ = [
    "ORDERS",
    "ActionKind",
    "LayerCosts",
    "LayerEdge",
    "PipelineAction",
    "PipelineEnds",
    "PipelineReplay",
    "PipelineSchedule",
    "StageCosts",
    "StageEdge",
    "StagePartition",
    "check_pipeline",
    "fastest_partition",
    "fill_drain",
    "interleaved",
    "live_microbatches",
    "one_forward_one_backward",
    "partition",
    "peak_activation_bytes",
    "pipeline_ends",
    "replay",
    "stage_costs",
    "stage_edges",
    "zero_bubble",
]
