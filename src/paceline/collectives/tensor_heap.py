"""Tensors in memory that all ranks of a host share, which reductions read in place.

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
    from paceline.collectives.host_group import DType
    from paceline.collectives.hosts import KeyValueStore


class TensorHeap:
    """Memory of this rank that the other ranks of its host have mapped.

    Every rank calls the same methods with the same sizes in the same order, `empty` apart. Memory
    is taken when it is written; that of a tensor is free again when its rank has no view of it
    left, and that of a shared one when the heap of rank 0 is gone as well.

    All but `empty` raise RankLost if a rank ended, and DeadlineExceeded if it did not come in time.

    Args:
        group: of all ranks, formed with room in its heap.
        timeout_s: the longest wait for another rank.
        process_group: torch's, of the same ranks; calls are recorded as its collectives.
    """

    path = "shared memory"  # the recorder asks: which way a call takes

    def __init__(self, group: HostGroup, timeout_s: float, process_group: Any) -> None:
        # Weak: a model with a heap may outlive its process group, whose threads must end with it.
        self._process_group = weakref.ref(process_group)
        self._group = group
        self._timeout_s = timeout_s
        self._shared: list[torch.Tensor] = []  # which peers may use longer than this rank does

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

    @property
    def process_group(self) -> Any:
        """Torch's group of the same ranks; None when it was destroyed. The recorder asks."""
        return self._process_group()

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
        # The group, and so the mapping, lives as long as a tensor that uses this memory.
        return _tensor_at(address, needed, dtype, self._group.release, address)

    def shared(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of which all ranks have one copy, with undefined values.

        What a rank writes, the others read after a barrier. The memory is rank 0's.

        Raises:
            MemoryExceeded: the heap of rank 0 is full.
        """
        own, problem = None, None
        if self._group.rank == 0:
            try:
                own = self.empty(length, dtype)
            except MemoryExceeded as full:
                problem = full
        tensor = self._at_root(own, length, dtype, problem)
        self._shared.append(tensor)
        return tensor

    def of_root(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, in the memory of rank 0.

        Args:
            tensor: flat, in the heap, with the same length and type on all ranks.
        """
        own = tensor if self._group.rank == 0 else None
        return self._at_root(own, tensor.numel(), tensor.dtype)

    def _at_root(
        self,
        own: torch.Tensor | None,
        length: int,
        dtype: torch.dtype,
        problem: MemoryExceeded | None = None,
    ) -> torch.Tensor:
        """Tell all ranks where a tensor of rank 0 lies; raise an error on all if there is none."""
        heap = self._group.heap_of(0)
        offset = torch.tensor([-1 if own is None else own.data_ptr() - heap])
        self._group.broadcast(offset.data_ptr(), size_bytes(offset), 0, self._timeout_s)
        if offset.item() < 0:
            raise problem or MemoryExceeded(
                f"the shared heap of rank 0 has no {length * dtype.itemsize} bytes left",
                fix="Form it with more room",
            )
        if own is not None:
            return own
        return _tensor_at(
            heap + int(offset.item()), length * dtype.itemsize, dtype, _keep, self._group
        )

    def average(self, tensor: torch.Tensor) -> None:
        """Average a contiguous tensor over the ranks, in place."""
        count, dtype = _counted(tensor)
        self._group.all_reduce(tensor.data_ptr(), count, dtype, ReduceOp.AVERAGE, self._timeout_s)

    def average_part(self, tensor: torch.Tensor) -> None:
        """Average this rank's part of a flat tensor of the heap, in place; the rest stays.

        Args:
            tensor: whose length the number of ranks divides into equal parts, by rank.
        """
        count, dtype = _counted(tensor)
        self._group.reduce_scatter_in_place(
            tensor.data_ptr(), count, dtype, ReduceOp.AVERAGE, self._timeout_s
        )

    def average_at_root(self, tensor: torch.Tensor) -> None:
        """Average a flat tensor of the heap on rank 0, in place.

        The other ranks return at once; theirs must not change before the next barrier.
        """
        count, dtype = _counted(tensor)
        self._group.reduce_in_place(
            tensor.data_ptr(), count, dtype, ReduceOp.AVERAGE, 0, self._timeout_s
        )

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._group.barrier(self._timeout_s)


def _tensor_at(
    address: int, length_bytes: int, dtype: torch.dtype, release: Any, argument: Any
) -> torch.Tensor:
    """Return a flat tensor at an address; when no view is left, `release(argument)` is called."""
    memory = (ctypes.c_char * length_bytes).from_address(address)
    weakref.finalize(memory, release, argument)
    return torch.frombuffer(memory, dtype=dtype)


def _counted(tensor: torch.Tensor) -> tuple[int, DType]:
    """Return how many elements of which type a tensor has, as native calls count them."""
    dtype, factor = native_type(tensor.dtype)
    return size_bytes(tensor) // tensor.element_size() * factor, dtype


def _keep(_group: HostGroup) -> None:
    """Do nothing: what may call this with a group keeps its memory mapped until then."""
