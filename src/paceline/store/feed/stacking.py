"""Memory for batches that is used again, and tensors that are stacked into it as they are made.

A fresh batch of tens of megabytes costs a page fault every 4 KiB, which takes as long as a good
part of decoding it. The core keeps such buffers (native/src/buffer_pool.cpp); a buffer returns to
the core when the last tensor that shares it is dropped.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.native import acquire_buffer

_MOST_BYTES = 1 << 62  # more does not fit into an address
_LEAST_BYTES = 1 << 20  # of a batch: for a smaller one torch's own stack is as fast


def recycled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor of any content in recycled memory.

    Raises:
        MemoryError: there is no memory left.
    """
    size = math.prod(shape) * dtype.itemsize
    if size >= _MOST_BYTES:
        raise MemoryError
    return torch.from_numpy(acquire_buffer(size)).view(dtype).view(shape)


class TensorStack:
    """Stacks tensors of one shape into one batch, as torch.stack does, while they are in the cache.

    Args:
        count: tensors at most.

    Attributes:
        items: what was added, once it is known not to fit into one tensor; then `batch` is None.
    """

    def __init__(self, count: int) -> None:
        self.items: list[Any] = []
        self._count = count
        self._batch: torch.Tensor | None = None
        self._filled = 0

    @property
    def batch(self) -> torch.Tensor | None:
        """The stacked tensors; None if they are only in `items`."""
        return None if self._batch is None else self._batch[: self._filled]

    def add(self, item: Any) -> None:
        """Add the next item."""
        if self._batch is None and not self.items:
            self._batch = _memory_for(item, self._count)
        if self._batch is None:
            self.items.append(item)
        elif _is_plain(item) and (item.dtype, item.shape) == (
            self._batch.dtype,
            self._batch.shape[1:],
        ):
            self._batch[self._filled].copy_(item)
            self._filled += 1
        else:
            self.items = [*self._batch[: self._filled], item]
            self._batch = None


def _memory_for(item: Any, count: int) -> torch.Tensor | None:
    """Return memory for `count` such items in their memory format; None: not worth it, or none."""
    if not _is_plain(item) or count * item.numel() * item.element_size() < _LEAST_BYTES:
        return None
    try:
        if item.is_contiguous() or item.dim() != 3 or not item.permute(1, 2, 0).is_contiguous():
            return recycled((count, *item.shape), item.dtype)
        channels, height, width = item.shape
        return recycled((count, height, width, channels), item.dtype).permute(0, 3, 1, 2)
    except MemoryError:  # torch's own stack says more
        return None


def _is_plain(item: Any) -> bool:
    return type(item) is torch.Tensor and item.device.type == "cpu" and not item.requires_grad
