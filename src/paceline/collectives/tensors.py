"""What the paths of the backend ask of tensors: types, memory, sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.collectives.host_group import DType
from paceline.core.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
# What passes to gloo may not be of these native types: "Invalid scalar type" (torch 2.13).
_NOT_OF_GLOO = frozenset({torch.int16})
_OF_BITS = frozenset({dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR})
_OF_COMPLEX = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.AVG})


class naming_members:  # noqa: N801  # used as a function; a generator would cost 2 us a call
    """A context in which an error that numbers the ranks of a group also gives their global ranks.

    Args:
        members: global ranks of the group, in order of their rank in it.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self._members = members

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, problem: object, _: object) -> None:
        members = self._members
        if isinstance(problem, PacelineError) and members != tuple(range(len(members))):
            known = ", ".join(f"{rank} is {member}" for rank, member in enumerate(members))
            place = f"global ranks: {known}"
            problem.where = f"{problem.where}; {place}" if problem.where else place


def native_type(dtype: torch.dtype) -> tuple[DType, int]:
    """Return the native type of a data type, and how many of it an element has."""
    return _TYPES[dtype]


def is_defined(kind: Any, dtype: torch.dtype) -> bool:
    """Return whether a reduction has a meaning for a type, and a native kernel."""
    if dtype.is_complex:
        return kind in _OF_COMPLEX
    return dtype in _TYPES and not (kind in _OF_BITS and dtype.is_floating_point)


def check_reduced(call: str, tensor: torch.Tensor) -> None:
    """Raise an error for a type that gloo does not reduce; before a call passes to gloo.

    gloo's own error, "Invalid scalar type", names neither the call nor the type.

    Raises:
        UsageError: a tensor of the CPU has such a type.
    """
    dtype = tensor.dtype
    is_native = dtype in _TYPES
    if is_plain(tensor) and (not is_native or dtype in _NOT_OF_GLOO):
        raise UsageError(
            f"there is no {call} of {dtype} values{' over gloo' if is_native else ''}",
            why="only ranks that share memory reduce that type" if is_native else "",
            fix="Convert the tensor to a type with one, such as torch.int32 or torch.float32",
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is ordinary memory of the CPU."""
    return tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_quantized


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor holds its values one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def dense_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy of its values where its memory is not that."""
    if _is_dense(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous one to copy from where its memory is not that."""
    if _is_dense(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def copy_back(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what a call left in the stand-in for a tensor; nothing where it is the tensor itself."""
    if dense is not tensor:
        tensor.detach().copy_(dense)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of `tensors`, one tensor after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what stands in `flat`, one after the other, to `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def decisive_bytes(call: str, tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes by which a call's path is chosen: all that a rank passes to it.

    Of a call in which a rank passes or gets the parts of all ranks, one part: calls with a list and
    with one long tensor are then alike.
    """
    sizes = map(size_bytes, tensors)
    return min(sizes, default=0) if call in ("all_gather", "reduce_scatter") else sum(sizes)


def size_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
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


def part_bytes(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the bytes of each rank's part of a tensor that is divided along its first dimension.

    Args:
        tensor: with at least one dimension.
        sizes: length of each rank's part; empty: all are equal.
        ranks: how many parts.
    """
    rows = tensor.shape[0]
    lengths = list(sizes) or [rows // ranks] * ranks
    row = size_bytes(tensor) // rows if rows else 0
    return [length * row for length in lengths]
