"""Counts the bytes of the tensors that are alive while a step is captured, and their peak.

A storage counts from the operator that makes it until the last tensor that refers to it is gone.
What an operator uses within itself, and holes between tensors, are not seen.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class LiveMemory:
    """The storages that are alive.

    Attributes:
        now_bytes: of all of them.
        peak_bytes: the most since `start_peak`.
    """

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._marked: set[int] = set()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of tensors that are not known."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._add(part.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # noqa: SLF001  # a storage has no other identity
        if key in self._sizes:
            return
        size = self._sizes[key] = storage.nbytes()
        self.now_bytes += size
        # The Python object of a storage lives as long as the storage itself (torch 2.1 and later).
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._sizes.pop(key)
        self._marked.discard(key)

    def mark(self, tensor: torch.Tensor) -> bool:
        """Mark a tensor's storage; return whether it was marked before, since it is alive."""
        self.add([tensor])
        key = tensor.untyped_storage()._cdata  # noqa: SLF001  # as above
        is_marked = key in self._marked
        self._marked.add(key)
        return is_marked

    def start_peak(self) -> None:
        """Begin to look for a peak."""
        self.peak_bytes = self.now_bytes


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a tensor's data."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001  # uncoalesced
    return (tensor,) if tensor.layout is torch.strided else ()
