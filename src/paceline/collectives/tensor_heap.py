"""Tensors in memory that all ranks of a host share, which an all-reduce reads in place.

An ordinary tensor is copied through the ring of its rank's segment; one in the heap is not, and is
reduced 1.5 to 3 times as fast (bench/collectives.py). Loaded by name: imports torch.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch

from paceline.collectives.host_group import HostGroup, ReduceOp
from paceline.collectives.hosts import find_hosts
from paceline.collectives.tensors import native_type, size_bytes
from paceline.core.errors import MemoryExceeded

if TYPE_CHECKING:
    from paceline.collectives.hosts import KeyValueStore


class TensorHeap:
    """Memory of this rank that the other ranks of its host have mapped.

    Every rank averages the same tensors in the same order. The memory is taken when it is written;
    that of a tensor is free again when no view of it is left.

    Args:
        group: of all ranks, formed with room in its heap.
        timeout_s: the longest wait for another rank.
        process_group: torch's, of the same ranks; calls are recorded as its collectives.
    """

    path = "shared memory"  # the recorder asks: which way a call takes

    def __init__(self, group: HostGroup, timeout_s: float, process_group: Any) -> None:
        self.process_group = process_group
        self._group = group
        self._timeout_s = timeout_s

    @classmethod
    def form(
        cls,
        store: KeyValueStore,
        rank: int,
        ranks: int,
        bytes_needed: int,
        timeout_s: float,
        process_group: Any,
    ) -> TensorHeap | None:
        """Return the heap of all ranks that call this; None where they do not share a host.

        Args:
            store: that all ranks share, and where no other heap was formed.
            rank: of this process.
            ranks: how many.
            bytes_needed: for all tensors that are in use at once; each takes whole pages.
            timeout_s: the longest wait for another rank.
            process_group: torch's, of the same ranks.
        """
        if len(find_hosts(store, rank, ranks, timeout_s)) > 1:
            return None
        group = HostGroup.form(
            store, rank, ranks, timeout_s, name="tensors", heap_bytes=bytes_needed
        )
        return cls(group, timeout_s, process_group)

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in the heap, with undefined values.

        Raises:
            MemoryExceeded: the heap is full.
        """
        needed = length * dtype.itemsize
        address: Any = self._group.allocate(needed)
        if address is None:
            raise MemoryExceeded(
                f"the shared heap has no {needed} bytes left", fix="Form it with more room"
            )
        memory = (ctypes.c_char * needed).from_address(address)
        # The group, and so the mapping, lives as long as a tensor that uses this memory.
        weakref.finalize(memory, self._group.release, address)
        return torch.frombuffer(memory, dtype=dtype)

    def average(self, tensor: torch.Tensor) -> None:
        """Average a contiguous tensor over the ranks, in place.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        dtype, factor = native_type(tensor.dtype)
        count = size_bytes(tensor) // tensor.element_size() * factor
        self._group.all_reduce(tensor.data_ptr(), count, dtype, ReduceOp.AVERAGE, self._timeout_s)
