"""All ranks skip a step, or none does: ranks that differ would train different models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    import torch


def agree(flag: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether the flag is set on any rank of the group.

    Args:
        flag: shape (), 0 or more; not 0 is set. On a device that the group's backend takes.
        group: None is the default group, or one process without any.

    Cost: one all-reduce of one number, and one transfer from the device.
    """
    if group is not None or dist.is_initialized():
        flag = flag.clone()
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())
