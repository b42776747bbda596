"""A rank's part of a linear layer, and its product with all ranks' rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from paceline.training.engine.exchange import SharedRows
from paceline.training.tensor_parallel.choice import Division


class PartProduct(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """x W^T + b, whose weights' gradients are multiplied: `apply(x, weight, bias, factor)`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        factor: float,
    ) -> torch.Tensor:
        """Return the product; all of it stays on this rank."""
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients; only those of weight and bias are multiplied."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        scaled = gradient * ctx.factor if needs_weight or needs_bias else gradient
        return (
            gradient @ weight if needs_x else None,
            scaled.t() @ x if needs_weight else None,
            scaled.sum(0) if needs_bias else None,
            None,
        )


@dataclass(slots=True)
class PassedColumns:
    """What the first layer of a pair hands to the second one beside its columns."""

    rows: SharedRows
    shape: torch.Size
    is_finite: torch.Tensor


@dataclass(slots=True, eq=False)
class DividedPart:
    """This rank's part of a linear layer, and how it computes.

    Attributes:
        layer: the module, whose forward pass is `compute`.
        name: in the model.
        number: in the order of the divided layers.
        division: of the weight.
        bounds: first element of each rank's part, and the end of the last one.
        first: the layer whose columns it takes, when both are called in their sequence.
        keeps_columns: whether the second of a pair follows, in the call that is being made.
        passed: between the two.
    """

    layer: nn.Linear
    name: str
    number: int
    division: Division
    bounds: list[int]
    first: DividedPart | None = None
    keeps_columns: bool = False
    passed: PassedColumns | None = None
    finite: list[torch.Tensor] = field(default_factory=list)

    @property
    def widths(self) -> list[int]:
        """Length of each rank's part."""
        return [end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def dims(self) -> dict[str, int]:
        """Return the dim along which each divided parameter is, by its name in the layer."""
        if self.division == "inputs":
            return {"weight": 1}
        return {"weight": 0} if self.layer.bias is None else {"weight": 0, "bias": 0}

    def own(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor, divided along a dim."""
        begin, end = self.bounds[rank : rank + 2]
        part = whole.narrow(dim, begin, end - begin)
        return part.clone(memory_format=torch.contiguous_format)
