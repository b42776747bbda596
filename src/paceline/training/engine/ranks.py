"""The ranks that train one model, and what they must agree on before they begin."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.collectives.tensor_heap import TensorHeap
from paceline.training.engine.buckets import bytes_of_buckets

if TYPE_CHECKING:
    from torch import nn

_HEAP_SLACK = 1 << 20
_FORM_S = 300.0  # the longest wait for a rank that does not call `find_ranks`
_calls = itertools.count()  # all ranks call `find_ranks` equally often: each call has its own keys


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group that trains together.

    Attributes:
        group: torch's; None: the default one, or one process without any.
        rank: of this process in the group.
        size: of the group.
        heap: shared memory for buckets, where all ranks share a host and train on CPUs; or None.
    """

    group: Any
    rank: int
    size: int
    heap: TensorHeap | None

    def empty(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor; in the heap where there is one."""
        if self.heap is not None:
            return self.heap.empty(length, dtype)
        return torch.empty(length, dtype=dtype, device=device)


def first_difference(own: Any, ranks: Ranks) -> tuple[int, Any, Any] | None:
    """Return the first rank whose value is not rank 0's, rank 0's value and its; None if all agree.

    All ranks call this and get the same.

    Args:
        own: of this rank; what torch can send as an object.
        ranks: to compare.
    """
    if ranks.size == 1:
        return None
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, own, group=ranks.group)
    for rank, other in enumerate(every):
        if other != every[0]:
            return rank, every[0], other
    return None


def find_ranks(model: nn.Module | None = None, group: Any = None) -> Ranks:
    """Return the ranks of a process group, or one rank where there is none.

    Every rank calls this. Where all share a host, they get shared memory for a model's buckets.

    Args:
        model: that Paceline's engine will train; None: another engine has its own memory.
        group: a process group in place of the default one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 0, 1, None)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    heap = _form_heap(model, group or dist.group.WORLD, rank, size) if model is not None else None
    return Ranks(group, rank, size, heap)


def _form_heap(model: nn.Module, group: Any, rank: int, size: int) -> TensorHeap | None:
    """Return shared memory with room for the buckets, where all ranks are on one host."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if size == 1 or any(parameter.device.type != "cpu" for parameter in parameters):
        return None
    store = dist.PrefixStore(f"training/{next(_calls)}", group.get_group_store())
    # Gradients and parameters, twice: new buckets are made beside the old ones. Room that nothing
    # is written to takes no memory.
    needed = 4 * bytes_of_buckets(parameters, size) + _HEAP_SLACK
    return TensorHeap.form(store, rank, size, needed, _FORM_S, group)
