"""Prepares a model and its optimizer for training on the ranks of the job.

    model, optimizer = prepare(model, optimizer)
    for batch, target in loader:
        optimizer.zero_grad()
        loss_fn(model(batch), target).backward()
        optimizer.step()

The loop stays as it was, with one process or many: everything else happens in the model's forward
pass, in hooks on its gradients, and in a hook before the optimizer's step.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives.tensor_heap import TensorHeap
from paceline.core.errors import UsageError
from paceline.training.engine.buckets import bytes_of_buckets
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.modes import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.plan import Plan

Engine = Literal["ddp", "allreduce", "sharded", "root"]
_HEAP_SLACK = 1 << 20
_FORM_S = 300.0  # the longest wait for a rank that has not called `prepare`
_calls = itertools.count()  # all ranks call `prepare` equally often: each call has keys of its own


@dataclass(slots=True)
class Prepared:
    """A model and an optimizer that train on all ranks. Unpacks into the two.

    Attributes:
        model: to pass batches through; its state dict is that of the model that was given.
        optimizer: the one that was given.
        rank: of this process.
        ranks: how many train.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer))


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    *,
    engine: Engine = "allreduce",
    group: Any = None,
    overlap: bool | None = None,
) -> Prepared:
    """Return the model and the optimizer, ready to train on all ranks of the process group.

    Every rank calls this. Without a process group it trains in this process alone.

    Args:
        model: on the device where it trains.
        optimizer: of the model's parameters, before its first step.
        plan: its buckets and precision are used; without one torch's defaults.
        engine: ``ddp`` is torch's DistributedDataParallel; the others are modes of Paceline's.
        group: a process group in place of the default one.
        overlap: whether communication overlaps computing; by itself: between hosts it does.

    Raises:
        UsageError: the ranks' models differ, or the optimizer has other parameters.
    """
    ranks = find_ranks(model, group)
    _check_parameters(model, optimizer)
    sizes: dict[str, Any] = {}
    if plan is not None:
        sizes = {"bucket_bytes": plan.bucket_bytes, "first_bucket_bytes": plan.first_bucket_bytes}
    wrapped: nn.Module
    if engine == "ddp":
        wrapped = model if ranks.size == 1 else _distributed(model, ranks, sizes)
    else:
        overlaps = ranks.heap is None if overlap is None else overlap
        wrapped = DataParallel(
            model,
            ranks,
            mode=engine,
            overlap_gradients=overlaps,
            overlap_parameters=overlaps,
            **sizes,
        )
        wrapped.adopt(optimizer)
    if ranks.rank == 0 and ranks.size > 1:
        sys.stderr.write(f"training: {ranks.size} ranks, {engine}\n")
    return Prepared(wrapped, optimizer, ranks.rank, ranks.size)


def find_ranks(model: nn.Module, group: Any = None) -> Ranks:
    """Return the ranks of a process group, or one rank where there is none.

    Every rank calls this. Where all share a host, they get shared memory for the model's gradients.

    Args:
        model: that they will train.
        group: a process group in place of the default one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 0, 1, None)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Ranks(group, rank, size, _form_heap(model, group or dist.group.WORLD, rank, size))


def _distributed(model: nn.Module, ranks: Ranks, sizes: dict[str, int]) -> nn.Module:
    megabytes = {"bucket_cap_mb": sizes["bucket_bytes"] / (1 << 20)} if sizes else {}
    device = next(model.parameters()).device
    devices = None if device.type == "cpu" else [device]
    return DistributedDataParallel(
        model,
        device_ids=devices,
        process_group=ranks.group,
        gradient_as_bucket_view=True,
        **megabytes,
    )


def _form_heap(model: nn.Module, group: Any, rank: int, size: int) -> TensorHeap | None:
    """Return shared memory with room for the gradients, where all ranks are on one host."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if size == 1 or any(parameter.device.type != "cpu" for parameter in parameters):
        return None
    store = dist.PrefixStore(f"training/{next(_calls)}", group.get_group_store())
    # Twice: new buckets are made beside the old ones.
    needed = 2 * bytes_of_buckets(parameters, size) + _HEAP_SLACK
    return TensorHeap.form(store, rank, size, needed, _FORM_S)


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise UsageError(
                    f"the optimizer updates a tensor of shape {list(parameter.shape)} that is no "
                    "parameter of the model",
                    where="prepare",
                    fix="Build the optimizer from model.parameters(), after the model was moved",
                )
