"""Memory plans as plain data: which tensors of a training step stay in memory, and which do not.

A recorded step becomes a `StepProfile`; `plan_memory` chooses for each tensor whether it is kept,
recomputed or spilled under a budget; `replay` says how long the step takes then, and how much
memory it has at its peak. `paceline.training.out_of_core` records and runs these plans.
"""

from paceline.schedules.memory.records import (
    ASSUMED_BYTES_PER_S,
    ManagedTensor,
    MemoryPlan,
    RecomputedModule,
    SpillTier,
    StepEvents,
    StepProfile,
    TensorAction,
)
from paceline.schedules.memory.selection import (
    SLACK_PART,
    least_budget_bytes,
    load_solver,
    plan_memory,
    target_budget_bytes,
)
from paceline.schedules.memory.timeline import Replayed, ReplayedInterval, TensorTransfer, replay

__all__ = [
    "ASSUMED_BYTES_PER_S",
    "SLACK_PART",
    "ManagedTensor",
    "MemoryPlan",
    "RecomputedModule",
    "Replayed",
    "ReplayedInterval",
    "SpillTier",
    "StepEvents",
    "StepProfile",
    "TensorAction",
    "TensorTransfer",
    "least_budget_bytes",
    "load_solver",
    "plan_memory",
    "replay",
    "target_budget_bytes",
]
