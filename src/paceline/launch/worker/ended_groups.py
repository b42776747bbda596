"""Keeps ranks that are not recorded from hanging as a script ends (the recorder does so itself).

The destructor of gloo's process group joins the group's threads. If a DistributedDataParallel has
the last reference, as one has that a function frees after it destroyed the groups, then it is
called with the GIL held (torch 2.13); a thread that still frees what the last collective left waits
for the GIL, and neither goes on. So Python keeps a reference, whose destructor holds no GIL.

Imports torch: a rank's worker imports this module with importlib.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

_held: list[Any] = []  # what was destroyed last


def hold_ended_groups() -> None:
    """Hold the process group that the script destroys, until it destroys another one."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def held(group: Any = None) -> None:
        if dist.is_initialized():
            _held[:] = [dist.group.WORLD if group is None else group]
        destroy(group)

    for module in (dist, dist.distributed_c10d):
        module.destroy_process_group = held
