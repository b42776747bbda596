"""LARS: stochastic gradient descent in which each layer's rate follows from its norms.

    local = trust |w| / (|g| + decay |w| + eps)          1 where |w| or |g| is 0, or not adapted
    v     = momentum v + (lr local) (g + decay w)
    w     = w - v                                        Nesterov: w - (momentum v + what v grew by)

An update of a layer thus has about `lr trust` of the norm of its weights, whatever the scale of the
gradient. At |g| much larger than decay |w| it does not depend on |g|; at |g| much smaller the rate
is trust / decay. The rate stands inside the velocity, as published: when it changes, what has
accumulated keeps the rate that it came with. Momentum correction multiplies it by the change, which
is the same as a rate outside (w = w - lr v).

Source: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888,
algorithm 1; Goyal et al., Accurate, Large Minibatch SGD, 2017, remark 2 (momentum correction).
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.core.errors import UsageError
from paceline.training.optimizers.layerwise import (
    LayerwiseOptimizer,
    check_range,
    locals_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.training.optimizers.layerwise import Work
    from paceline.training.optimizers.norms import LayerNorms


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling; see the module for the algorithm.

    Parameters of at most one dim take the plain rate; make groups with `parameter_groups` so that
    all normalisation layers do, and do not decay.
    """

    def __init__(  # noqa: PLR0913  # hyper-parameters, by keyword
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        momentum_correction: bool = False,
        norms: LayerNorms | None = None,
    ) -> None:
        """Make the optimizer.

        Args:
            params: parameters, or groups of them (`parameter_groups`).
            lr: the global rate, which a schedule changes.
            momentum: share of the velocity that a step keeps.
            weight_decay: L2 decay; part of the gradient, and of the local rate's denominator.
            trust_coefficient: the local rate's factor (eta in the paper).
            eps: added to the local rate's denominator.
            nesterov: look ahead by the velocity, as in torch's SGD; needs a momentum.
            momentum_correction: multiply the velocity by lr_new / lr_old when the rate changes.
            norms: of layers that ranks share; by default plain tensors and DTensors are handled.

        Raises:
            UsageError: a value is out of its range, or Nesterov has no momentum.
        """
        check_range("lr", float(lr), 0, math.inf)
        check_range("momentum", momentum, 0, 1)
        if nesterov and not momentum:
            raise UsageError("nesterov=True needs a momentum", fix="Pass a momentum, such as 0.9")
        check_range("weight_decay", weight_decay, 0, math.inf)
        check_range("trust_coefficient", trust_coefficient, 0, math.inf)
        check_range("eps", eps, 0, math.inf)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "momentum_correction": momentum_correction,
            "previous_lr": None,
        }
        super().__init__(params, defaults, norms)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)  # of a state that an earlier version saved

    def _update(self, work: Work) -> None:
        norms = self._norms(work, [p.grad for _, parameters in work for p in parameters])
        for group, parameters in work:
            lr = float(group["lr"])
            rates = [lr * _local_rate(group, *norms.get(p, (0.0, 0.0))) for p in parameters]
            self._update_group(group, parameters, rates)
            group["previous_lr"] = lr

    def _update_group(
        self, group: dict[str, Any], parameters: list[torch.Tensor], rates: list[float]
    ) -> None:
        weights = locals_of(parameters)
        gradients = locals_of([p.grad for p in parameters])
        decay, momentum = group["weight_decay"], group["momentum"]
        velocities = locals_of([self._velocity(p) for p in parameters]) if momentum else []
        kept = momentum * _correction(group) if momentum else 0.0
        ahead = momentum if group["nesterov"] else None
        if _are_on_cpu(weights):
            steps = _Steps(rates, decay, kept, ahead)
            _update_in_place(weights, velocities, gradients, steps)
            return
        updates = torch._foreach_add(gradients, weights, alpha=decay)  # noqa: SLF001
        torch._foreach_mul_(updates, rates)
        if momentum:
            torch._foreach_mul_(velocities, kept)
            torch._foreach_add_(velocities, updates)
            if ahead is None:
                updates = velocities
            else:
                torch._foreach_add_(updates, velocities, alpha=ahead)
        torch._foreach_sub_(weights, updates)

    def _velocity(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.preserve_format
            )
        return state["momentum_buffer"]


def _are_on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


class _Steps(NamedTuple):
    rates: Sequence[float]  # of each layer
    decay: float
    kept: float  # of the velocity
    ahead: float | None  # Nesterov's momentum


def _update_in_place(
    weights: Sequence[torch.Tensor],
    velocities: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    steps: _Steps,
) -> None:
    """Update layer by layer without memory for a copy of the gradients.

    On a CPU such memory is new in each step, and its page faults take longer than the update.
    """
    rates, decay, kept, ahead = steps
    for weight, gradient, rate, velocity in zip_longest(weights, gradients, rates, velocities):
        if velocity is None:
            weight.mul_(1 - rate * decay).add_(gradient, alpha=-rate)
            continue
        velocity.mul_(kept).add_(gradient, alpha=rate)
        if decay:
            velocity.add_(weight, alpha=rate * decay)
        if ahead is None:
            weight.sub_(velocity)
        else:
            weight.mul_(1 - rate * decay).add_(gradient, alpha=-rate).sub_(velocity, alpha=ahead)


def _local_rate(group: dict[str, Any], weight_norm: float, gradient_norm: float) -> float:
    """Return the layer's own rate; 1 for a layer that does not adapt, whose norms are 0 here.

    A layer of zeros must move as well, which a rate of 0 would prevent for ever.
    """
    if not (weight_norm > 0 and gradient_norm > 0):
        return 1.0
    denominator = gradient_norm + group["weight_decay"] * weight_norm + group["eps"]
    return float(group["trust_coefficient"] * weight_norm / denominator)


def _correction(group: dict[str, Any]) -> float:
    """Return the velocity's factor for a changed rate; 1 after a rate of 0, whose velocity is 0."""
    previous = group["previous_lr"]
    return float(group["lr"]) / previous if group["momentum_correction"] and previous else 1.0
