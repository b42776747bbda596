"""Sends gradients as float16 or bfloat16, and adds them up in float32.

Reduce-scatter and all-gather carry the 16-bit values as bytes, so that backends which cannot add
bfloat16 (gloo) send it as well, and the sum is rounded once however many ranks there are. torch's
``fp16_compress_hook`` and ``bf16_compress_hook`` round after each addition, and the second refuses
to run without NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.training.compression.exchange import all_gather
from paceline.training.compression.wire import rounded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

_TYPES = (torch.float16, torch.bfloat16)


def average_in_16_bits(flat: Tensor, dtype: torch.dtype, group: ProcessGroup | None) -> None:
    """Replace a flat tensor by its average over ranks, sent with 16 bits per element.

    Args:
        flat: float32, equally long on all ranks; changed.
        dtype: float16 (values beyond 65,504 saturate) or bfloat16.
        group: of the ranks; None for all ranks.

    Cost: 4 (N - 1) / N bytes per element and rank, half of float32.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if ranks == 1:
        flat.copy_(rounded(flat, dtype))
        return
    share = -(-flat.numel() // ranks)
    sent = torch.zeros(ranks * share, dtype=dtype, device=flat.device)
    sent[: flat.numel()] = rounded(flat, dtype)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
    mean = received.view(ranks, share).sum(0, dtype=torch.float32).div_(ranks)
    own = rounded(mean, dtype).to(dtype)
    all_gather(sent.view(torch.uint8), own.view(torch.uint8), group)
    flat.copy_(sent[: flat.numel()])


class HalfCompression:
    """Averages gradients with 16 bits per element on the wire; has no state.

    Args:
        dtype: float16 or bfloat16.

    Raises:
        UsageError: another dtype.
    """

    accumulates = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in _TYPES:
            raise UsageError(
                f"{dtype} is no 16-bit float",
                where="HalfCompression",
                fix="Choose torch.float16 or torch.bfloat16",
            )
        self.dtype = dtype

    def reduce(
        self, named_gradients: Iterable[tuple[str, Tensor]], group: ProcessGroup | None = None
    ) -> None:
        """Replace the gradients by their averages over the ranks of a group."""
        gradients = [gradient for _, gradient in named_gradients]
        flat = torch.cat([gradient.reshape(-1).to(torch.float32) for gradient in gradients])
        average_in_16_bits(flat, self.dtype, group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def reduce_buffer(
        self,
        buffer: Tensor,
        named_gradients: Iterable[tuple[str, Tensor]],  # unused: as all compressors
        group: ProcessGroup | None = None,
    ) -> None:
        """Replace a flat buffer of gradients by its average over the ranks of a group."""
        flat = buffer.to(torch.float32)
        average_in_16_bits(flat, self.dtype, group)
        if flat is not buffer:
            buffer.copy_(flat)

    def end_step(self) -> None:
        """Nothing changes from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept the state of `state_dict`."""
        assert not state, "16-bit compression has no state"
