"""Which parameters decay and take a rate of their own, and which do not.

Biases and the scales of normalisation layers have small norms that say nothing about their layer's
curvature: a rate from their norm is far too small, and decay pulls a scale away from 1. Published
large-batch results leave both out, and implementations that did not lost accuracy.

Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.3 (no decay); You, Gitman,
Ginsburg, Large Batch Training of Convolutional Networks, 2017 (no adaptation).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.core.errors import UsageError

_NORMALISATION = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
)


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer: weights, and biases with normalisation layers.

    The second group has no decay, and LARS and LAMB give it the plain rate. A parameter belongs to
    it if its module normalises (whatever its shape) or if it has at most one dim. Other optimizers
    take the groups too, and ignore the key ``layer_adaptation``.

    Call it before parameters are replaced by flat slices, which all have one dim.

    Args:
        model: whose trained parameters are grouped; a shared parameter counts once, and is excluded
            if any of its modules normalises.
        weight_decay: of the first group.

    Returns:
        Groups with ``params``, ``weight_decay`` and ``layer_adaptation``; one without parameters is
        left out.

    Raises:
        UsageError: the model has no parameter that is trained.

    >>> groups = parameter_groups(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), weight_decay=0.1)
    >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
    [(1, 0.1), (3, 0.0)]
    """
    normalising = {
        parameter
        for module in model.modules()
        if isinstance(module, _NORMALISATION)
        for parameter in module.parameters(recurse=False)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(
            f"{type(model).__name__} has no trained parameter",
            fix="Set requires_grad on what is to be trained before making the optimizer",
        )
    adapted = [p for p in trained if p not in normalising and is_adapted(p)]
    excluded = [p for p in trained if p in normalising or not is_adapted(p)]
    groups: list[dict[str, Any]] = [
        {"params": adapted, "weight_decay": weight_decay, "layer_adaptation": True},
        {"params": excluded, "weight_decay": 0.0, "layer_adaptation": False},
    ]
    return [group for group in groups if group["params"]]


def is_adapted(parameter: torch.Tensor) -> bool:
    """Return whether a parameter takes a rate of its own by its shape: more than one dim."""
    return bool(parameter.ndim > 1)
