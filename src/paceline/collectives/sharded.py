"""Collectives of a group on several hosts, each with as many ranks: each rank exchanges a share.

All-reduce of n bytes, with L ranks on each of H hosts::

    host A   rank 0  rank 1        host B   rank 2  rank 3
    1        reduce-scatter  ...   shared memory: each rank has the host's sum of n/L bytes
    2        rank 0 <----------------> rank 2     all-reduce of n/L bytes between the ranks
             rank 1 <----------------> rank 3     that hold the same shard, all at once
    3        all-gather  ...       shared memory: each rank has all n bytes

A link carries 2 n (H-1)/H bytes each way; a flat ring that knows no hosts carries up to twice that.

The other calls are of the same two stages, between ranks of equal index on their hosts, and give or
take a row of a tensor for each rank:

    reduce-scatter   host: reduce-scatter of the rows of each index; between: all-to-all, then sums
    all-gather       between: all-gather; host: all-gather of what each index has
    gather           host: gather to the rank with the root's index; between: gather to the root
    scatter          between: scatter from the root; host: scatter by the rank with its index

These two stages see rows ordered by host or by index. Group ranks need not be in such an order, so
rows pass through scratch memory, in chunks of some columns, H times `chunk_bytes` in all rows. With
three chunks under way a call takes at most seven times that, and gloo its copies of what it sends.

Source: two-level sharding as in Horovod's NCCLHierarchicalAllreduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.collectives.tensors import copy_back, dense_of, native_type, room_for, size_bytes
from paceline.collectives.two_level import REDUCTIONS, TwoLevelPath, gloo_reduction, later, timed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ShardedPath(TwoLevelPath):
    """The collectives of a group on hosts with equally many ranks; arguments as `TwoLevelPath`."""

    reduced: ClassVar[frozenset[str]] = TwoLevelPath.reduced | {"reduce_scatter"}
    moved: ClassVar[frozenset[str]] = TwoLevelPath.moved | {"all_gather", "gather", "scatter"}

    def reduce_scatter(
        self, output: torch.Tensor, given: torch.Tensor, op: Any, timeout_s: float
    ) -> None:
        """Reduce `given` over the ranks; fill `output` with this rank's part.

        A link carries n (H-1)/H bytes each way for n bytes of `given`. Hosts' sums are added in one
        step, in float32 where they are shorter, so that the result is rounded once.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        target = room_for(output)
        rows, part = self._rows(dense_of(given)), target.detach().view(-1)
        self._overlap(
            self._reduce_scatter_chunk(rows[:, columns], part[columns], op, timeout_s)
            for columns in self._columns(part)
        )
        copy_back(target, output)

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, timeout_s: float) -> None:
        """Fill `output` with all ranks' tensors, one after the other.

        A link carries n (H-1)/H bytes each way for n bytes of `output`.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        target = room_for(output)
        rows, part = self._rows(_raw(target)), _raw(dense_of(given))
        self._overlap(
            self._all_gather_chunk(rows[:, columns], part[columns], timeout_s)
            for columns in self._columns(part)
        )
        copy_back(target, output)

    def gather(
        self, output: torch.Tensor, given: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        """Fill the contiguous `output` of `root` with all ranks' tensors, one after the other.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        part = _raw(dense_of(given))
        rows = self._rows(_raw(output)) if self._place.has(root) else part.new_empty(0, len(part))
        self._overlap(
            self._gather_chunk(rows[:, columns], part[columns], root, timeout_s)
            for columns in self._columns(part)
        )

    def scatter(
        self, output: torch.Tensor, given: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        """Fill `output` with this rank's part of the contiguous `given` of `root`.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        target = room_for(output)
        part = _raw(target)
        rows = self._rows(_raw(given)) if self._place.has(root) else part.new_empty(0, len(part))
        self._overlap(
            self._scatter_chunk(rows[:, columns], part[columns], root, timeout_s)
            for columns in self._columns(part)
        )
        copy_back(target, output)

    # --- chunks -----------------------------------------------------------------------------------

    def _speaker(self, index: int) -> int:
        return index

    def _all_reduce_chunk(self, chunk: torch.Tensor, op: Any, timeout_s: float) -> Iterator[Any]:
        ranks = self._group.ranks
        count = -(-chunk.numel() // ranks)
        whole = chunk
        if count * ranks != chunk.numel():  # what is added belongs to no tensor
            whole = torch.zeros(count * ranks, dtype=chunk.dtype)
            whole[: chunk.numel()] = chunk
        shard = torch.empty(count, dtype=chunk.dtype)
        self._reduce_scatter_inside(whole, shard, op, timeout_s)
        sent = self._for_wire(shard, op)
        options = timed(c10d.AllreduceOptions(), timeout_s)
        options.reduceOp = gloo_reduction(op)
        yield self._cross.allreduce([sent], options)
        shard.copy_(sent)
        self._average(shard, op)
        self._group.all_gather(
            shard.data_ptr(), whole.data_ptr(), size_bytes(shard), later(timeout_s)
        )
        if whole is not chunk:
            chunk.copy_(whole[: chunk.numel()])

    def _reduce_scatter_chunk(
        self, rows: torch.Tensor, target: torch.Tensor, op: Any, timeout_s: float
    ) -> Iterator[Any]:
        """Reduce the rows of all ranks on the host, exchange them, and add the hosts' sums."""
        given = _OrderedRows(rows, self._by_index())
        given.load()
        sums = torch.empty((len(self._place.hosts), target.numel()), dtype=target.dtype)
        self._reduce_scatter_inside(given.dense, sums, op, timeout_s)
        del given  # its memory, while the sums are on the wire
        sent = self._for_wire(sums, op)
        received = torch.empty_like(sent)
        options = timed(c10d.AllToAllOptions(), timeout_s)
        yield self._cross.alltoall_base(_raw(received), _raw(sent), [], [], options)
        target.copy_(_combined(received, op, target.dtype))
        self._average(target, op)

    def _all_gather_chunk(
        self, rows: torch.Tensor, part: torch.Tensor, timeout_s: float
    ) -> Iterator[Any]:
        """Collect the parts of the ranks with this rank's index, then those of all indices."""
        gathered = torch.empty((len(self._place.hosts), part.numel()), dtype=part.dtype)
        options = timed(c10d.AllgatherOptions(), timeout_s)
        yield self._cross.allgather([list(gathered.unbind(0))], [part], options)
        filled = _OrderedRows(rows, self._by_index())
        self._group.all_gather(
            gathered.data_ptr(), filled.dense.data_ptr(), size_bytes(gathered), later(timeout_s)
        )
        filled.store()

    def _gather_chunk(
        self, rows: torch.Tensor, part: torch.Tensor, root: int, timeout_s: float
    ) -> Iterator[Any]:
        """Collect the parts of each host at the rank with the root's index, then at the root."""
        host, index = self._place.of(root)
        holds = self._place.local_rank == index
        filled = _OrderedRows(rows, self._by_host())
        inside = part.new_empty(part.numel() * self._group.ranks if holds else 0)
        self._group.gather(part.data_ptr(), inside.data_ptr(), part.numel(), index, timeout_s)
        work = None
        if holds:
            options = timed(c10d.GatherOptions(), timeout_s)
            options.rootRank = host
            work = self._cross.gather(self._of_hosts(filled, root), [inside], options)
        yield work
        if self._place.has(root):
            filled.store()

    def _scatter_chunk(
        self, rows: torch.Tensor, part: torch.Tensor, root: int, timeout_s: float
    ) -> Iterator[Any]:
        """Give each host the parts of its ranks, then each rank its part."""
        host, index = self._place.of(root)
        holds = self._place.local_rank == index
        given = _OrderedRows(rows, self._by_host())
        inside = part.new_empty(part.numel() * self._group.ranks if holds else 0)
        work = None
        if holds:
            if self._place.has(root):
                given.load()
            options = timed(c10d.ScatterOptions(), timeout_s)
            options.rootRank = host
            work = self._cross.scatter([inside], self._of_hosts(given, root), options)
        yield work
        self._group.scatter(
            inside.data_ptr(), part.data_ptr(), part.numel(), index, later(timeout_s)
        )

    # --- what serves chunks -----------------------------------------------------------------------

    def _reduce_scatter_inside(
        self, whole: torch.Tensor, shard: torch.Tensor, op: Any, timeout_s: float
    ) -> None:
        """Reduce over the ranks of the host; each gets a part as large as `shard`."""
        dtype, factor = native_type(whole.dtype)
        self._group.reduce_scatter(
            *(whole.data_ptr(), shard.data_ptr(), shard.numel() * factor, dtype),
            *(REDUCTIONS[op.op], timeout_s),
        )

    def _rows(self, dense: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor as a row for each rank."""
        return dense.detach().view(self._size, -1)

    def _columns(self, part: torch.Tensor) -> Iterator[slice]:
        """Return what the chunks of a rank's part are of it."""
        step = max(self._config.chunk_bytes // part.element_size() // self._group.ranks, 1)
        return (slice(first, first + step) for first in range(0, part.numel(), step))

    def _by_host(self) -> list[int]:
        """Return the ranks of the first host, then those of the second, and so on."""
        return [rank for ranks in self._place.hosts for rank in ranks]

    def _by_index(self) -> list[int]:
        """Return the first rank of each host, then the second of each, and so on."""
        return [rank for ranks in zip(*self._place.hosts, strict=True) for rank in ranks]

    def _of_hosts(self, rows: _OrderedRows, root: int) -> list[list[torch.Tensor]]:
        """Return rows by host as gloo wants them: a list of a list at the root, else nothing."""
        hosts = len(self._place.hosts)
        return [list(rows.dense.view(hosts, -1).unbind(0))] if self._place.has(root) else []


class _OrderedRows:
    """Rows of ranks in another order, contiguous; the rows' own memory where it is that already.

    Args:
        rows: by rank; not necessarily contiguous.
        order: the ranks in the order to have.
    """

    def __init__(self, rows: torch.Tensor, order: Sequence[int]) -> None:
        self._rows = rows
        self._order = order
        is_dense = rows.is_contiguous() and list(order) == sorted(order)
        self.dense = rows if is_dense else torch.empty(rows.shape, dtype=rows.dtype)

    def load(self) -> None:
        """Copy the ranks' rows to `dense`."""
        if self.dense is not self._rows:
            for row, rank in zip(self.dense, self._order, strict=True):
                row.copy_(self._rows[rank])

    def store(self) -> None:
        """Copy `dense` to the ranks' rows."""
        if self.dense is not self._rows:
            for row, rank in zip(self.dense, self._order, strict=True):
                self._rows[rank].copy_(row)


def _combined(parts: torch.Tensor, op: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the reduction of rows; of types shorter than float32 it is rounded once."""
    if op.op == dist.ReduceOp.MIN:
        return parts.amin(0)
    if op.op == dist.ReduceOp.MAX:
        return parts.amax(0)
    if op.op == dist.ReduceOp.PRODUCT:
        return parts.prod(0, dtype=dtype)
    return parts.sum(0, dtype=dtype)


def _raw(dense: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, in one dimension."""
    return dense.detach().view(-1).view(torch.uint8)
