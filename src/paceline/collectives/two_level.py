"""Collectives of a group on several hosts, each with as many ranks: inside a host, then between.

All-reduce of n bytes, with L ranks on each of H hosts::

    host A   rank 0  rank 1        host B   rank 2  rank 3
    1        reduce-scatter  ...   shared memory: each rank has the host's sum of n/L bytes
    2        rank 0 <----------------> rank 2     all-reduce of n/L bytes between the ranks
             rank 1 <----------------> rank 3     that hold the same shard, all at once
    3        all-gather  ...       shared memory: each rank has all n bytes

A tensor passes in chunks: the exchange of a chunk is under way while the host sums the next one. A
link carries 2 n (H-1)/H bytes each way; a flat ring that knows no hosts carries up to twice that.
All calls run on one communication thread, in the order in which they were made.

Source: A. A. Awan et al., S-Caffe, PPoPP 2017 (hierarchical reduction); two-level sharding as in
Horovod's NCCLHierarchicalAllreduce.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.collectives.communication_thread import CommunicationThread
from paceline.collectives.host_group import ReduceOp
from paceline.collectives.tensors import (
    copy_back,
    dense_of,
    is_plain,
    naming_members,
    native_type,
    size_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.collectives.host_group import HostGroup
    from paceline.collectives.options import CollectivesConfig

_REDUCTIONS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.SUM,  # divided by the number of ranks in between
    dist.ReduceOp.MIN: ReduceOp.MINIMUM,
    dist.ReduceOp.MAX: ReduceOp.MAXIMUM,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
}
# What both the native kernels and gloo reduce.
_TYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)


_SUMS = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.AVG})
_CHUNKS_ON_WIRE = 2  # gloo has two threads


class HostPlace(NamedTuple):
    """Where a group's ranks are.

    Attributes:
        hosts: the group ranks of each host, all of one length.
        host: number of this rank's host.
        local_rank: number of this rank on its host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    local_rank: int

    def of(self, rank: int) -> tuple[int, int]:
        """Return host and index of a rank."""
        for host, ranks in enumerate(self.hosts):
            if rank in ranks:
                return host, ranks.index(rank)
        raise ValueError(rank)


class _Chunk(NamedTuple):
    """A part of a tensor that is being reduced.

    Attributes:
        target: the part, contiguous.
        whole: the same, or a copy that the host's ranks can divide.
        shard: this rank's share of it.
        sent: the same, or a copy in the data type of the wire.
        work: gloo's all-reduce of it over hosts.
    """

    target: torch.Tensor
    whole: torch.Tensor
    shard: torch.Tensor
    sent: torch.Tensor
    work: Any


class TwoLevelPath:
    """The collectives of a group on several hosts.

    Calls may come from any thread; all run on the communication thread.

    Args:
        place: where the ranks are.
        group: shared memory of this host's ranks.
        members: the numbers of this host's ranks in the job, for errors.
        cross: gloo between the ranks with this rank's index, by host.
        config: sizes and data types on the wire.
    """

    def __init__(
        self,
        place: HostPlace,
        group: HostGroup,
        members: tuple[int, ...],
        cross: Any,
        config: CollectivesConfig,
    ) -> None:
        self._place = place
        self._group = group
        self._members = members
        self._cross = cross
        self._config = config
        self._size = sum(map(len, place.hosts))
        self._thread = CommunicationThread("paceline-collectives")

    def run(self, result: list[Any], call: Callable[..., None], *args: Any) -> Any:
        """Have the communication thread run one of the calls below; return its work."""

        def named() -> None:
            with naming_members(self._members):
                call(*args)

        return self._thread.submit(result, named)

    def reduces(self, call: str, tensors: Sequence[torch.Tensor], op: Any) -> bool:
        """Return whether a reduction of tensors like these runs here; the same on all ranks."""
        return (
            call in ("all_reduce", "reduce")
            and op.op in _REDUCTIONS
            and sum(map(size_bytes, tensors)) >= self._config.flat_below_bytes
            and all(is_plain(tensor) and tensor.dtype in _TYPES for tensor in tensors)
        )

    def moves(self, call: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a copy of tensors like these runs here; the same on all ranks."""
        return (
            call == "broadcast"
            and sum(map(size_bytes, tensors)) >= self._config.flat_below_bytes
            and all(map(is_plain, tensors))
        )

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any, timeout_s: float) -> None:
        """Reduce each tensor over the ranks, in place.

        Raises:
            RankLost: a rank of this host did not call this before the deadline, or ended.
            RuntimeError: a rank of another host did not (from gloo).
        """
        for tensor in tensors:
            dense = dense_of(tensor)
            self._all_reduce_flat(dense.detach().view(-1), op, timeout_s)
            copy_back(dense, tensor)

    def _all_reduce_flat(self, flat: torch.Tensor, op: Any, timeout_s: float) -> None:
        """Reduce a tensor by chunks: while two are on the wire, the next is summed on the host."""
        under_way: deque[_Chunk] = deque()
        for chunk in flat.split(self._chunk_count(flat)):
            under_way.append(self._start(chunk, op, timeout_s))
            if len(under_way) > _CHUNKS_ON_WIRE:
                self._finish(under_way.popleft(), op, timeout_s)
        while under_way:
            self._finish(under_way.popleft(), op, timeout_s)

    def _wire_type(self, dtype: torch.dtype, op: Any) -> torch.dtype:
        """Return the data type in which a reduction's tensors travel between hosts."""
        rounded = self._config.wire == "bfloat16" and dtype == torch.float32 and op.op in _SUMS
        return torch.bfloat16 if rounded else dtype

    def _chunk_count(self, flat: torch.Tensor) -> int:
        """Return the elements of a chunk, a multiple of the ranks of a host."""
        ranks = self._group.ranks
        chunk_bytes = self._config.chunk_bytes * len(self._place.hosts)
        return max(chunk_bytes // int(flat.element_size()) // ranks, 1) * ranks

    def _start(self, chunk: torch.Tensor, op: Any, timeout_s: float) -> _Chunk:
        """Sum a chunk on the host, and start the exchange of this rank's shard of it."""
        ranks = self._group.ranks
        count = -(-chunk.numel() // ranks)
        whole = chunk
        if count * ranks != chunk.numel():  # what is added belongs to no tensor
            whole = torch.zeros(count * ranks, dtype=chunk.dtype)
            whole[: chunk.numel()] = chunk
        shard = torch.empty(count, dtype=chunk.dtype)
        dtype, factor = native_type(chunk.dtype)
        self._group.reduce_scatter(
            *(whole.data_ptr(), shard.data_ptr(), count * factor, dtype),
            *(_REDUCTIONS[op.op], timeout_s),
        )
        sent = shard.to(self._wire_type(shard.dtype, op))  # the shard itself where that is its type
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op.op in _SUMS else op
        options.timeout = timedelta(seconds=timeout_s)
        return _Chunk(chunk, whole, shard, sent, self._cross.allreduce([sent], options))

    def _finish(self, chunk: _Chunk, op: Any, timeout_s: float) -> None:
        """Wait for the hosts' sum of this rank's shard, and give it to the ranks of the host."""
        shard = chunk.shard
        chunk.work.wait()
        if chunk.sent is not shard:
            shard.copy_(chunk.sent)
        if op.op == dist.ReduceOp.AVG:
            shard.div_(self._size, rounding_mode=None if shard.is_floating_point() else "trunc")
        self._group.all_gather(
            shard.data_ptr(), chunk.whole.data_ptr(), size_bytes(shard), timeout_s
        )
        if chunk.whole is not chunk.target:
            chunk.target.copy_(chunk.whole[: chunk.target.numel()])

    def reduce(self, tensor: torch.Tensor, op: Any, root: int, timeout_s: float) -> None:
        """Reduce a tensor over the ranks into that of `root`.

        Raises:
            RankLost: a rank of this host did not call this before the deadline, or ended.
            RuntimeError: a rank of another host did not (from gloo).
        """
        host, index = self._place.of(root)
        dense = dense_of(tensor)
        if dense is tensor and (self._place.host, self._place.local_rank) != (host, index):
            dense = tensor.clone()  # only the root's changes
        dtype, factor = native_type(dense.dtype)
        self._group.reduce(
            *(dense.data_ptr(), dense.numel() * factor, dtype),
            *(_REDUCTIONS[op.op], index, timeout_s),
        )
        if self._place.local_rank != index:
            return
        options = c10d.ReduceOptions()
        is_average = op.op == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if is_average else op
        options.rootRank = host
        options.timeout = timedelta(seconds=timeout_s)
        self._cross.reduce([dense], options).wait()
        if self._place.host == host:
            if is_average:
                dense.div_(self._size, rounding_mode=None if dense.is_floating_point() else "trunc")
            copy_back(dense, tensor)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, timeout_s: float) -> None:
        """Copy the tensors of `root` to all ranks: once to each host, then inside it.

        Raises:
            RankLost: a rank of this host did not call this before the deadline, or ended.
            RuntimeError: a rank of another host did not (from gloo).
        """
        host, index = self._place.of(root)
        for tensor in tensors:
            dense = dense_of(tensor)
            raw = dense.detach().view(-1).view(torch.uint8)
            if self._place.local_rank == index:
                options = c10d.BroadcastOptions()
                options.rootRank = host
                options.timeout = timedelta(seconds=timeout_s)
                self._cross.broadcast([raw], options).wait()
            self._group.broadcast(raw.data_ptr(), raw.numel(), index, timeout_s)
            copy_back(dense, tensor)

    def abort(self, reason: str) -> None:
        """End what the ranks have under way with an error that gives the reason."""
        self._group.abort(reason)
        self._cross.abort()

    def close(self) -> None:
        """End the thread, and give the memory back."""
        self._thread.close()
        self._cross.shutdown()
        self._group.close()
