"""Collectives on tensors in the memory that the ranks of one host share.

Turns torch's tensors into addresses for `host_group.HostGroup`, whose calls block, release the GIL
and have a deadline. A tensor that is not contiguous is copied there and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.collectives.host_group import ReduceOp
from paceline.collectives.tensors import (
    copy_back,
    dense_of,
    is_defined,
    is_plain,
    naming_members,
    native_type,
    part_bytes,
    room_for,
    size_bytes,
)
from paceline.collectives.works import CompletedWork, MessageWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from paceline.collectives.host_group import HostGroup
    from paceline.native import HostMessage

_REDUCTIONS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVERAGE,
    dist.ReduceOp.MIN: ReduceOp.MINIMUM,
    dist.ReduceOp.MAX: ReduceOp.MAXIMUM,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}


_ANY_RANK = -1


class HostPath:
    """The collectives and messages of a group whose ranks all share memory.

    Any thread may call; collectives run one at a time.

    Args:
        group: the ranks' shared memory.
        members: the ranks' numbers in the job, for errors.
    """

    def __init__(self, group: HostGroup, members: tuple[int, ...]) -> None:
        self._group = group
        self._members = members
        self._posted: set[MessageWork] = set()  # the tensors of what is under way must stay

    def run(self, result: list[Any], call: Callable[..., None], *args: Any) -> CompletedWork:
        """Run one of the calls below, here and now; return a work that is over."""
        with naming_members(self._members):
            call(*args)
        return CompletedWork(result)

    def reduces(self, call: str, tensors: Sequence[torch.Tensor], op: Any) -> bool:
        """Return whether tensors like these are reduced here; the same on all ranks."""
        del call  # all of them
        kind = op.op
        return kind in _REDUCTIONS and all(
            is_plain(tensor) and is_defined(kind, tensor.dtype) for tensor in tensors
        )

    def moves(self, call: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors like these are copied here; the same on all ranks."""
        del call  # all of them
        return all(map(is_plain, tensors))

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any, timeout_s: float) -> None:
        """Reduce each tensor over the ranks, in place.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        for tensor in tensors:
            dense = dense_of(tensor)
            dtype, factor = native_type(dense.dtype)
            self._group.all_reduce(
                dense.data_ptr(), dense.numel() * factor, dtype, _REDUCTIONS[op.op], timeout_s
            )
            copy_back(dense, tensor)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int, timeout_s: float) -> None:
        """Reduce a tensor over the ranks into that of `root`.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        dense = dense_of(tensor)
        dtype, factor = native_type(dense.dtype)
        self._group.reduce(
            dense.data_ptr(), dense.numel() * factor, dtype, _REDUCTIONS[op.op], root, timeout_s
        )
        if self._group.rank == root:
            copy_back(dense, tensor)

    def reduce_scatter(
        self, output: torch.Tensor, given: torch.Tensor, op: Any, timeout_s: float
    ) -> None:
        """Reduce `given` over the ranks; fill `output` with this rank's part.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        source, target = dense_of(given), room_for(output)
        dtype, factor = native_type(output.dtype)
        self._group.reduce_scatter(
            source.data_ptr(),
            target.data_ptr(),
            target.numel() * factor,
            dtype,
            _REDUCTIONS[op.op],
            timeout_s,
        )
        copy_back(target, output)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, timeout_s: float) -> None:
        """Copy the tensors of `root` to all ranks.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        for tensor in tensors:
            dense = dense_of(tensor)
            self._group.broadcast(dense.data_ptr(), size_bytes(dense), root, timeout_s)
            if self._group.rank != root:
                copy_back(dense, tensor)

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, timeout_s: float) -> None:
        """Fill `output` with all ranks' tensors, one after the other.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        source, target = dense_of(given), room_for(output)
        self._group.all_gather(source.data_ptr(), target.data_ptr(), size_bytes(source), timeout_s)
        copy_back(target, output)

    def gather(
        self, output: torch.Tensor, given: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        """Fill the contiguous `output` of `root` with all ranks' tensors, one after the other.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        source = dense_of(given)
        self._group.gather(
            source.data_ptr(), output.data_ptr(), size_bytes(source), root, timeout_s
        )

    def scatter(
        self, output: torch.Tensor, given: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        """Fill `output` with this rank's part of the contiguous `given` of `root`.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        target = room_for(output)
        self._group.scatter(
            given.data_ptr(), target.data_ptr(), size_bytes(target), root, timeout_s
        )
        copy_back(target, output)

    def all_to_all(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Exchange parts of the first dimension; without sizes the parts are equal.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        source, target = dense_of(given), room_for(output)
        self._group.all_to_all(
            source.data_ptr(),
            target.data_ptr(),
            part_bytes(given, input_sizes, self._group.ranks),
            part_bytes(output, output_sizes, self._group.ranks),
            timeout_s,
        )
        copy_back(target, output)

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        self._group.barrier(timeout_s)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> Any:
        """Send a tensor to a rank; return the work of the message.

        Raises:
            RankLost: the group is unusable since a rank ended.
        """
        dense = dense_of(tensor)
        with naming_members(self._members):
            message = self._group.post_send(dense.data_ptr(), size_bytes(dense), peer, tag)
        return self._work_of(dense, dense, message, timeout_s)  # nothing to copy back

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout_s: float) -> Any:
        """Receive a tensor from a rank, or with `peer` None from any; return the work.

        Raises:
            RankLost: the group is unusable since a rank ended.
            CollectiveMismatch: the message has another size.
        """
        dense = room_for(tensor)
        sender = _ANY_RANK if peer is None else peer
        with naming_members(self._members):
            message = self._group.post_receive(dense.data_ptr(), size_bytes(dense), sender, tag)
        if message.over:
            copy_back(dense, tensor)
        return self._work_of(tensor, dense, message, timeout_s)

    def _work_of(
        self, tensor: torch.Tensor, dense: torch.Tensor, message: HostMessage, timeout_s: float
    ) -> CompletedWork | MessageWork:
        if message.over:
            return CompletedWork([tensor], message.peer)
        self._posted = {work for work in self._posted if not work.is_success()}
        work = MessageWork(tensor, dense, message, self._group, self._members, timeout_s)
        self._posted.add(work)
        return work

    def abort(self, reason: str) -> None:
        """End what the ranks have under way with an error that gives the reason."""
        self._group.abort(reason)

    def close(self) -> None:
        """Give the memory back."""
        self._group.close()
