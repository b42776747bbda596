"""What a gradient becomes for its way between ranks, and back."""

from __future__ import annotations

import torch


class GradientCompressor:
    """Sends floating-point tensors in another data type; None sends them as they are."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return what to send, and what `decompress` needs."""
        if self._dtype is None or not tensor.is_floating_point():
            return tensor, tensor.dtype
        return tensor.to(self._dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what was received, in the data type it had."""
        return tensor.to(dtype)


class Compression:
    """The choices, by Horovod's names; bfloat16 is ours."""

    none = GradientCompressor(None)
    fp16 = GradientCompressor(torch.float16)
    bf16 = GradientCompressor(torch.bfloat16)
