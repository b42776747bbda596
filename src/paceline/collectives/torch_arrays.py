"""The operations of `paceline.collectives.arrays` on tensors. Loaded by name: imports torch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from paceline.core.errors import UsageError


def divide(target: torch.Tensor, count: int) -> None:
    """Divide a tensor in place; integers towards zero."""
    exact = target.is_floating_point() or target.is_complex()
    target.div_(count, rounding_mode=None if exact else "trunc")


class TorchArrays:
    """Torch's tensors, on any device."""

    COMBINE: ClassVar[dict[str, Any]] = {
        "sum": torch.add,
        "average": torch.add,
        "min": torch.minimum,
        "max": torch.maximum,
        "product": torch.mul,
    }

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a view in one dimension, which autograd does not see."""
        if not buffer.is_contiguous():
            raise UsageError(
                f"the tensor of shape {tuple(buffer.shape)} is not contiguous",
                fix="Pass buffer.contiguous(), and copy the result back",
            )
        return buffer.detach().view(-1)

    def scratch(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Return a tensor with undefined values."""
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def combine(self, op: str, target: torch.Tensor, values: torch.Tensor) -> None:
        """Reduce in place."""
        self.COMBINE[op](target, values, out=target)

    def divide(self, target: torch.Tensor, count: int) -> None:
        """Divide in place."""
        divide(target, count)
