"""Collectives on tensors in the memory that the ranks of one host share.

Turns torch's tensors into addresses for `host_group.HostGroup`, whose calls block, release the GIL
and have a deadline. A tensor that is not contiguous is copied there and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.collectives.host_group import DType, ReduceOp
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.collectives.host_group import HostGroup

# Type of a tensor -> the native type, and how many of it an element has.
_TYPES = {
    torch.float32: (DType.FLOAT32, 1),
    torch.float64: (DType.FLOAT64, 1),
    torch.float16: (DType.FLOAT16, 1),
    torch.bfloat16: (DType.BFLOAT16, 1),
    torch.int8: (DType.INT8, 1),
    torch.int16: (DType.INT16, 1),
    torch.int32: (DType.INT32, 1),
    torch.int64: (DType.INT64, 1),
    torch.uint8: (DType.UINT8, 1),
    torch.bool: (DType.BOOL, 1),
    torch.complex64: (DType.FLOAT32, 2),
    torch.complex128: (DType.FLOAT64, 2),
}
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
_OF_BITS = frozenset({dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR})
_OF_COMPLEX = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.AVG})


class HostPath:
    """The collectives of a group whose ranks all share memory; any thread, one call at a time.

    Args:
        group: the ranks' shared memory.
    """

    name = "shared memory"

    def __init__(self, group: HostGroup) -> None:
        self._group = group

    def reduces(self, tensors: Sequence[torch.Tensor], op: Any) -> bool:
        """Return whether tensors like these are reduced here; the same on all ranks."""
        kind = op.op
        return kind in _REDUCTIONS and all(
            _is_plain(tensor) and _is_defined(kind, tensor.dtype) for tensor in tensors
        )

    def moves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors like these are copied here; the same on all ranks."""
        return all(map(_is_plain, tensors))

    def all_reduce(self, tensor: torch.Tensor, op: Any, timeout_s: float) -> None:
        """Reduce a tensor over the ranks, in place.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        dense = _dense(tensor)
        dtype, factor = _TYPES[dense.dtype]
        self._group.all_reduce(
            dense.data_ptr(), dense.numel() * factor, dtype, _REDUCTIONS[op.op], timeout_s
        )
        _copy_back(dense, tensor)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int, timeout_s: float) -> None:
        """Reduce a tensor over the ranks into that of `root`.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        dense = _dense(tensor)
        dtype, factor = _TYPES[dense.dtype]
        self._group.reduce(
            dense.data_ptr(), dense.numel() * factor, dtype, _REDUCTIONS[op.op], root, timeout_s
        )
        if self._group.rank == root:
            _copy_back(dense, tensor)

    def reduce_scatter(
        self, output: torch.Tensor, given: torch.Tensor, op: Any, timeout_s: float
    ) -> None:
        """Reduce `given` over the ranks; fill `output` with this rank's part.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        source, target = _dense(given), _room(output)
        dtype, factor = _TYPES[output.dtype]
        self._group.reduce_scatter(
            source.data_ptr(),
            target.data_ptr(),
            target.numel() * factor,
            dtype,
            _REDUCTIONS[op.op],
            timeout_s,
        )
        _copy_back(target, output)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float) -> None:
        """Copy the tensor of `root` to all ranks.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        dense = _dense(tensor)
        self._group.broadcast(dense.data_ptr(), _bytes(dense), root, timeout_s)
        if self._group.rank != root:
            _copy_back(dense, tensor)

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, timeout_s: float) -> None:
        """Fill `output` with all ranks' tensors, one after the other.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        source, target = _dense(given), _room(output)
        self._group.all_gather(source.data_ptr(), target.data_ptr(), _bytes(source), timeout_s)
        _copy_back(target, output)

    def gather(
        self, output: torch.Tensor, given: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        """Fill the contiguous `output` of `root` with all ranks' tensors, one after the other.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        source = _dense(given)
        self._group.gather(source.data_ptr(), output.data_ptr(), _bytes(source), root, timeout_s)

    def scatter(
        self, output: torch.Tensor, given: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        """Fill `output` with this rank's part of the contiguous `given` of `root`.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        target = _room(output)
        self._group.scatter(given.data_ptr(), target.data_ptr(), _bytes(target), root, timeout_s)
        _copy_back(target, output)

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
        source, target = _dense(given), _room(output)
        self._group.all_to_all(
            source.data_ptr(),
            target.data_ptr(),
            _part_bytes(given, input_sizes, self._group.ranks),
            _part_bytes(output, output_sizes, self._group.ranks),
            timeout_s,
        )
        _copy_back(target, output)

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        self._group.barrier(timeout_s)

    def abort(self, reason: str) -> None:
        """End what the ranks have under way with an error that gives the reason."""
        self._group.abort(reason)

    def close(self) -> None:
        """Give the memory back."""
        self._group.close()


def _is_defined(kind: Any, dtype: torch.dtype) -> bool:
    """Return whether a reduction has a meaning for a type, and a native kernel."""
    if dtype.is_complex:
        return kind in _OF_COMPLEX
    return dtype in _TYPES and not (kind in _OF_BITS and dtype.is_floating_point)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_quantized


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy of its values where its memory is not that."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _room(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous one to copy from where its memory is not that."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy_back(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    if dense is not tensor:
        tensor.detach().copy_(dense)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def check_sizes(call: str, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Raise an error unless `whole` has room for a tensor like `part` of each rank, and no more.

    Raises:
        UsageError: it has not, or another data type.
    """
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise UsageError(
            f"{whole.numel()} elements of {whole.dtype} are not {ranks} times {part.numel()} of "
            f"{part.dtype}",
            where=call,
            fix="Give one tensor with the parts of all ranks, and one with the part of one rank",
        )


def check_parts(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> None:
    """Raise an error unless a tensor can be divided along its first dimension.

    Args:
        tensor: what an all-to-all sends or fills.
        sizes: length of each rank's part; empty: all are equal.
        ranks: how many parts.

    Raises:
        UsageError: the sizes are not those of the tensor.
    """
    rows = tensor.shape[0] if tensor.ndim else 0
    if not tensor.ndim or (len(sizes) != ranks or sum(sizes) != rows if sizes else rows % ranks):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be divided between {ranks} ranks",
            where="all_to_all_single",
            why=f"the lengths of the parts are {list(sizes)}"
            if sizes
            else f"{rows} rows are no multiple of {ranks}",
            fix="Give a length for each rank; they must add up to the first dimension",
        )


def _part_bytes(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the bytes of each rank's part of a tensor that is divided along its first dimension.

    Args:
        tensor: with at least one dimension.
        sizes: length of each rank's part; empty: all are equal.
        ranks: how many parts.
    """
    rows = tensor.shape[0]
    lengths = list(sizes) or [rows // ranks] * ranks
    row = _bytes(tensor) // rows if rows else 0
    return [length * row for length in lengths]
