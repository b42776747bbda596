"""Optimizers and learning rates for large batches.

::

    parameter_groups(model)          which parameters decay and adapt          `groups`
        LARS, LAMB                   one rate per layer, from norms            `lars`, `lamb`
            LayerNorms               norms of layers that ranks share          `norms`
        large_batch_schedule         scaling rule, warm-up, decay              `schedule`

All are ordinary torch objects: `LARS` and `LAMB` are optimizers, a schedule is an LRScheduler.
Importing this package imports torch.
"""

from paceline.training.optimizers.groups import parameter_groups
from paceline.training.optimizers.lamb import LAMB
from paceline.training.optimizers.lars import LARS
from paceline.training.optimizers.norms import LayerNorms, ShardedNorms
from paceline.training.optimizers.schedule import (
    LargeBatchRate,
    large_batch_schedule,
    linear_scaling,
    square_root_scaling,
)

__all__ = [
    "LAMB",
    "LARS",
    "LargeBatchRate",
    "LayerNorms",
    "ShardedNorms",
    "large_batch_schedule",
    "linear_scaling",
    "parameter_groups",
    "square_root_scaling",
]
