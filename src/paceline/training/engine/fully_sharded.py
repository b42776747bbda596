"""Torch's FSDP2 for a model and the optimizer that was made for it.

`fully_shard` replaces a model's parameters by DTensors, each of which has a part on every rank. The
optimizer has the parameters from before: it gets their successors, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from paceline.core.errors import UsageError
from paceline.training.engine.modes import broadcast_values
from paceline.training.engine.optimizer_checks import check_elementwise, check_stateless

if TYPE_CHECKING:
    import torch


def shard_fully(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> nn.Module:
    """Shard a model's parameters over the ranks of a group; return the model, changed in place.

    Each layer of an nn.Sequential or nn.ModuleList is gathered and freed on its own, and the rest
    together. All ranks call this; they start from the parameters of rank 0.

    Raises:
        UsageError: the optimizer has state already, which belongs to whole parameters, or may look
            at whole tensors; or parameters that are gathered together have several types.
    """
    check_elementwise(optimizer, "prepare(engine='fsdp2')")
    check_stateless(optimizer)
    layers = _layers_of(model)
    _check_types([*layers, model])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    broadcast_values(model, group)
    kind = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, kind)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    successors = dict(model.named_parameters())
    for parameters in optimizer.param_groups:
        parameters["params"] = [successors[names[id(old)]] for old in parameters["params"]]
    return model


def _check_types(groups: list[nn.Module]) -> None:
    """Raise an error if parameters that torch would gather together have several types.

    Args:
        groups: inner ones first; each gathers what those before it do not.
    """
    taken: set[int] = set()
    for group in groups:
        own = [(name, p) for name, p in group.named_parameters() if id(p) not in taken]
        taken |= {id(parameter) for _, parameter in own}
        other = next((entry for entry in own if entry[1].dtype != own[0][1].dtype), None)
        if other is not None:
            raise UsageError(
                "fully_shard gathers parameters of one type together, and these have two",
                where="prepare(engine='fsdp2')",
                why=f"{own[0][0]} is {own[0][1].dtype}, {other[0]} is {other[1].dtype}",
                fix="Give them one type, put them into layers of their own in an nn.ModuleList, or "
                "use engine='allreduce'",
            )


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of containers, inner ones first, as fully_shard must be called."""
    layers: dict[nn.Module, None] = {}
    for container in model.modules():  # outer ones first
        if isinstance(container, nn.Sequential | nn.ModuleList):
            layers |= {layer: None for layer in container if any(True for _ in layer.parameters())}
    inner_first = [layer for layer in reversed(list(model.modules())) if layer in layers]
    return [layer for layer in inner_first if layer is not model]
