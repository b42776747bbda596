"""LAMB: Adam in which each layer's update has the norm of its weights.

    m = b1 m + (1 - b1) g              m^ = m / (1 - b1^t)
    v = b2 v + (1 - b2) g g            v^ = v / (1 - b2^t)
    u = m^ / (sqrt(v^) + eps) + decay w
    w = w - lr (|w| / |u|) u           the ratio is 1 where |w| or |u| is 0, or not adapted

An update of a layer has exactly `lr` of the norm of its weights.

Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR
2020, algorithm 2, with phi(z) = z.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import UsageError
from paceline.training.local_tensors import like
from paceline.training.optimizers.layerwise import (
    LayerwiseOptimizer,
    check_range,
    locals_of,
)

if TYPE_CHECKING:
    from paceline.training.optimizers.layerwise import Work
    from paceline.training.optimizers.norms import LayerNorms


class LAMB(LayerwiseOptimizer):
    """Layer-wise adaptive moments; see the module for the algorithm.

    Parameters of at most one dim take Adam's update; make groups with `parameter_groups` so that
    all normalisation layers do, and do not decay. Weights in float16 are refused: squares of their
    gradients vanish in it, and what is divided by them overflows.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        norms: LayerNorms | None = None,
    ) -> None:
        """Make the optimizer.

        Args:
            params: parameters, or groups of them (`parameter_groups`).
            lr: the global rate, which a schedule changes.
            betas: decay of the gradients' mean and of the mean of their squares.
            eps: added to the root of the squares' mean.
            weight_decay: decoupled from the moments, but part of the update whose norm is taken.
            bias_correction: divide the means by what the first steps lack.
            norms: of layers that ranks share; by default plain tensors and DTensors are handled.

        Raises:
            UsageError: a value is out of its range.
        """
        check_range("lr", float(lr), 0, math.inf)
        check_range("betas[0]", betas[0], 0, 1)
        check_range("betas[1]", betas[1], 0, 1)
        check_range("eps", eps, 0, math.inf)
        check_range("weight_decay", weight_decay, 0, math.inf)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, norms)

    def _update(self, work: Work) -> None:
        updates = [update for group, ps in work for update in self._adam_updates(group, ps)]
        parameters = [p for _, ps in work for p in ps]
        wholes = [like(update, p) for update, p in zip(updates, parameters, strict=True)]
        norms = self._norms(work, wholes)
        rates = [
            float(group["lr"]) * _trust_ratio(*norms.get(p, (0.0, 0.0)))
            for group, ps in work
            for p in ps
        ]
        torch._foreach_mul_(updates, rates)
        torch._foreach_sub_(locals_of(parameters), updates)

    def _adam_updates(
        self, group: dict[str, Any], parameters: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Advance the moments; return Adam's update with decay, of what this rank holds."""
        states = [self._state(p) for p in parameters]
        means = locals_of([state["exp_avg"] for state in states])
        squares = locals_of([state["exp_avg_sq"] for state in states])
        gradients = locals_of([p.grad for p in parameters])
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        # In place from here on: memory for another copy costs more on a CPU than what fills it.
        updates: list[torch.Tensor] = torch._foreach_sqrt(squares)  # noqa: SLF001
        if group["bias_correction"]:
            steps = [float(state["step"]) for state in states]
            torch._foreach_mul_(updates, [1 / math.sqrt(1 - beta2**step) for step in steps])
            torch._foreach_add_(updates, group["eps"])
            torch._foreach_mul_(updates, [1 - beta1**step for step in steps])
        else:
            torch._foreach_add_(updates, group["eps"])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, means)
        if group["weight_decay"]:
            torch._foreach_add_(updates, locals_of(parameters), alpha=group["weight_decay"])
        return updates

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            if parameter.dtype == torch.float16:
                raise UsageError(
                    "LAMB does not take weights in float16",
                    why="the squares of gradients vanish in it, and the update overflows",
                    fix="Keep them in float32: prepare(precision='float16'), or autocast",
                )
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the host, as torch's Adam
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _trust_ratio(weight_norm: float, update_norm: float) -> float:
    """Return the factor of a layer's update; 1 for a layer that does not adapt, of norms 0 here."""
    return weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
