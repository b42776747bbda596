"""An optimizer that averages gradients over the ranks before it steps.

Gradients of one data type are reduced together, in buckets, when the optimizer steps: on one host
overlapping them with the backward pass gains nothing (bench/step_time.py). Between hosts
DistributedDataParallel overlaps, and is the better choice.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.collectives.horovod.calls import Average, Sum
from paceline.collectives.horovod.compression import Compression, GradientCompressor
from paceline.collectives.horovod.ranks import size
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_BUCKET_BYTES = 64 * 1024 * 1024  # Horovod's threshold of fusion


class _SynchronizedSteps:
    """What the class of a distributed optimizer adds to the class that it wraps."""

    param_groups: list[dict[str, Any]]
    _compression: GradientCompressor
    _op: int
    _passes: int
    _is_synchronized: bool
    _skips: bool

    def synchronize(self) -> None:
        """Average the gradients over the ranks now; the next step does not."""
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        for parameter in parameters:
            if parameter.grad is None:  # other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
        divisor = (size() if self._op == Average else 1) * self._passes
        for bucket in _buckets([parameter.grad for parameter in parameters]):
            _reduce(bucket, self._compression, divisor)
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let steps within this context use the gradients as they are."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then step."""
        if not (self._skips or self._is_synchronized):
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)  # type: ignore[misc]  # the wrapped class has it


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: GradientCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
) -> Any:
    """Return an optimizer that shares the state of `optimizer` and averages gradients first.

    Args:
        optimizer: what steps; its class stays a base of the returned object's.
        named_parameters: not needed here: gradients are matched by their order.
        compression: what is sent in place of a gradient.
        backward_passes_per_step: how many backward passes a step sums up; divides the gradients.
        op: Average or Sum.

    Raises:
        UsageError: the operation is another one.
    """
    del named_parameters
    if op not in (Average, Sum):
        raise UsageError(
            f"DistributedOptimizer reduces by Average (0) or Sum (1), got {op}", fix="Choose one"
        )
    name = type(optimizer).__name__
    wrapped: Any = type(name, (_SynchronizedSteps, type(optimizer)), {})
    distributed = wrapped.__new__(wrapped)
    # Without `step`: a scheduler of learning rates has put its own there, bound to `optimizer`.
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}
    distributed.__dict__.update(
        own,
        _compression=compression,
        _op=op,
        _passes=backward_passes_per_step,
        _is_synchronized=False,
        _skips=False,
    )
    return distributed


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients in lists of one data type and a limited size; the same on all ranks."""
    lists: dict[torch.dtype, list[torch.Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for gradient in gradients:
        dtype, size_bytes = gradient.dtype, gradient.numel() * gradient.element_size()
        if lists.get(dtype) and filled[dtype] + size_bytes > _BUCKET_BYTES:
            yield lists.pop(dtype)
            filled[dtype] = 0
        lists.setdefault(dtype, []).append(gradient)
        filled[dtype] = filled.get(dtype, 0) + size_bytes
    yield from lists.values()


def _reduce(gradients: list[torch.Tensor], compression: GradientCompressor, divisor: int) -> None:
    """Sum gradients over the ranks and divide them, in place."""
    flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
    sent, dtype = compression.compress(flat)
    dist.all_reduce(sent)
    flat = compression.decompress(sent, dtype)
    if divisor != 1:
        flat.div_(divisor)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.detach().copy_(part.view_as(gradient))
