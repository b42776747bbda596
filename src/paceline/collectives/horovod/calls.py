"""Horovod's collective calls, each of them one or two of torch.distributed's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.collectives.horovod.compression import Compression, GradientCompressor
from paceline.collectives.horovod.ranks import size
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Average, Sum, Adasum, Min, Max, Product = range(6)
_OPERATIONS = {
    Average: dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class ReductionHandle:
    """An all-reduce that is under way; `synchronize` returns its tensor."""

    def __init__(self, work: Any, finish: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self._finish = finish

    def is_over(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """Wait for the all-reduce; return its result."""
        self._work.wait()
        return self._finish()


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: GradientCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the tensor reduced over the ranks; by default its average.

    Args:
        tensor: of one shape and data type on all ranks.
        average: Horovod's older way to choose Average or Sum.
        name: not needed here: calls are matched by their order.
        compression: what is sent in place of the tensor.
        op: Average, Sum, Min, Max or Product.
        prescale_factor: what the tensor is multiplied by before.
        postscale_factor: what the result is multiplied by.

    Raises:
        UsageError: the operation is Adasum, which is not offered.
    """
    return allreduce_async(
        tensor, average, name, op, prescale_factor, postscale_factor, compression
    ).wait()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor in place, as `allreduce`; return it."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: GradientCompressor = Compression.none,
) -> ReductionHandle:
    """Start an all-reduce of a copy of a tensor, as `allreduce`; return its handle."""
    del name
    number = _operation(average, op)
    sent, dtype = compression.compress(tensor.detach() * prescale_factor)
    sent = sent.to(sent.dtype, copy=True) if sent.data_ptr() == tensor.data_ptr() else sent
    work = dist.all_reduce(sent, _OPERATIONS[number], async_op=True)

    def finish() -> torch.Tensor:
        result = compression.decompress(sent, dtype)
        return _scaled(result, number, postscale_factor).to(tensor.dtype)

    return ReductionHandle(work, finish)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> ReductionHandle:
    """Start an all-reduce of a tensor in place, as `allreduce`; return its handle."""
    del name
    number = _operation(average, op)
    inside = tensor.detach()
    if prescale_factor != 1.0:
        inside.mul_(prescale_factor)
    work = dist.all_reduce(inside, _OPERATIONS[number], async_op=True)

    def finish() -> torch.Tensor:
        inside.copy_(_scaled(inside, number, postscale_factor))
        return tensor

    return ReductionHandle(work, finish)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, op: int | None = None
) -> list[torch.Tensor]:
    """Return several tensors reduced over the ranks, as `allreduce`."""
    handles = [allreduce_async(tensor, average=average, op=op) for tensor in tensors]
    return [handle.wait() for handle in handles]


def _operation(average: bool | None, op: int | None) -> int:
    if average is not None:
        return Average if average else Sum
    number = Average if op is None else op
    if number not in _OPERATIONS:
        raise UsageError(
            f"reduction {number} is not offered",
            where="allreduce",
            why="Adasum is 2; offered are Average (0), Sum (1), Min (3), Max (4) and Product (5)",
            fix="Choose one of these",
        )
    return number


def _scaled(result: torch.Tensor, number: int, factor: float) -> torch.Tensor:
    if number == Average:
        is_float = result.is_floating_point() or result.is_complex()
        result = result / size() if is_float else result.div(size(), rounding_mode="trunc")
    return result if factor == 1.0 else result * factor


def synchronize(handle: ReductionHandle) -> torch.Tensor:
    """Wait for an all-reduce that was started; return its result."""
    return handle.wait()


def poll(handle: ReductionHandle) -> bool:
    """Return whether an all-reduce that was started is over."""
    return handle.is_over()


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return all ranks' tensors, joined along the first dimension; its length may differ."""
    del name
    tensor = tensor.detach().contiguous()
    lengths = torch.empty(size(), dtype=torch.int64)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(tensor)]))
    rows = lengths.tolist()
    padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return a copy of the root's tensor."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Fill a tensor with that of the root; return it."""
    del name
    dist.broadcast(tensor.detach(), root_rank)
    return tensor


def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | None = None, name: str | None = None
) -> Any:
    """Return what all ranks sent to this one, joined; with `splits` also how much each sent.

    Args:
        tensor: its rows go to the ranks in order.
        splits: how many rows go to each rank; None sends equal parts.
        name: not needed here: calls are matched by their order.
    """
    del name
    given = tensor.detach().contiguous()
    if splits is None:
        output = torch.empty_like(given)
        dist.all_to_all_single(output, given)
        return output
    received = torch.empty(size(), dtype=torch.int64)
    dist.all_to_all_single(received, splits.to(torch.int64))
    sizes = received.tolist()
    output = given.new_empty((sum(sizes), *given.shape[1:]))
    dist.all_to_all_single(output, given, sizes, splits.tolist())
    return output, received.to(splits.dtype)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Fill all tensors of a model's state_dict(), or of named_parameters(), with the root's."""
    items = params.items() if hasattr(params, "items") else params
    for _, tensor in sorted(items, key=lambda item: item[0]):
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give an optimizer the root's state and settings."""
    state = broadcast_object(optimizer.state_dict(), root_rank)
    if dist.get_rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's object."""
    del name
    objects = [obj]
    dist.broadcast_object_list(objects, root_rank)
    return objects[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return all ranks' objects, by rank."""
    del name
    objects = [None] * size()
    dist.all_gather_object(objects, obj)
    return objects


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()
