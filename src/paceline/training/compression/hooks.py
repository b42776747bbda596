"""Compressors as communication hooks of DistributedDataParallel, and torch's PowerSGD.

A compressor averages the gradients of a bucket; the hook calls it on a thread of its own, so that
backward goes on meanwhile. Exchanges happen in the order of the buckets, which is the same on all
ranks, and in groups of ranks that nothing else communicates in. On a GPU the hook runs where it is
called, on the stream of backward.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from paceline.core.errors import UsageError
from paceline.training.compression.dgc import DeepGradientCompression

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import GradBucket, ProcessGroup
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

_LOG = logging.getLogger(__name__)


class Compressor(Protocol):
    """Averages gradients over ranks; one thread at a time.

    Attributes:
        accumulates: whether it may average the gradients of several passes before a step.
    """

    accumulates: bool

    def reduce_buffer(
        self,
        buffer: Tensor,
        named_gradients: Iterable[tuple[str, Tensor]],
        group: ProcessGroup | None = None,
    ) -> None:
        """Replace a flat buffer of gradients by their average."""

    def end_step(self) -> None:
        """Count a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, keyed by parameter name."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that `state_dict` returned."""


class HookState:
    """What DistributedDataParallel hands to the hook: a compressor, and the names of parameters.

    Args:
        model: whose gradients are averaged.
        compressor: that averages them.
        check_finite: refuse gradients that are not finite, before the compressor's state takes
            them: all ranks together, or those with finite ones would wait for the others. Costs one
            pass over the gradients, and an all-reduce of one number for each bucket.
    """

    def __init__(
        self, model: DistributedDataParallel, compressor: Compressor, *, check_finite: bool = True
    ) -> None:
        self.compressor = compressor
        self.check_finite = check_finite
        self.group = dist.new_group(
            dist.get_process_group_ranks(model.process_group), use_local_synchronization=True
        )
        # By identity: buckets hold the parameters themselves.
        self._names = {id(value): name for name, value in model.module.named_parameters()}
        # The only thread that calls the compressor.
        self._thread = ThreadPoolExecutor(1, "paceline-compression")

    def hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to average a bucket; return the future of its buffer.

        The future has an error on all ranks if a gradient is not finite on one.
        """
        buffer = bucket.buffer()
        named = [
            (self._names[id(parameter)], gradient)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        future: Future[Tensor] = torch.futures.Future()
        if buffer.is_cuda:
            self._average(buffer, named, bucket.is_last(), future)
        else:
            self._thread.submit(self._average, buffer, named, bucket.is_last(), future)
        return future

    def _average(
        self,
        buffer: Tensor,
        named: Sequence[tuple[str, Tensor]],
        is_last: bool,
        future: Future[Tensor],
    ) -> None:
        try:
            if self.check_finite:
                self._check(buffer, named)
            self.compressor.reduce_buffer(buffer, named, self.group)
            if is_last:
                self.compressor.end_step()
        except Exception as problem:  # noqa: BLE001  # whatever it is, backward waits for it
            # DistributedDataParallel only says that the hook's result is no tensor.
            _LOG.exception("the average of compressed gradients failed")
            future.set_exception(problem)
        else:
            future.set_result(buffer)

    def _check(self, buffer: Tensor, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raise an error on all ranks if a gradient is not finite on one.

        Raises:
            UsageError: a gradient is not finite; the error names the rank.
        """
        is_good = is_finite(buffer)
        bad = torch.tensor(0 if is_good else 1 + dist.get_rank(self.group), device=buffer.device)
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=self.group)
        if not is_good:
            raise not_finite(named)
        if bad:
            raise UsageError(
                f"a gradient of rank {int(bad) - 1} is not finite",
                where=f"rank {dist.get_rank()}",
                why="no rank compressed it: a residual keeps an infinity or a NaN for good",
                fix="See the error of that rank, which names the parameter",
            )


def register_hook(
    model: DistributedDataParallel, compressor: Compressor, *, check_finite: bool = True
) -> HookState:
    """Let a compressor average a model's gradients; all ranks call this together.

    Args:
        model: without a communication hook; before its first backward pass.
        compressor: DeepGradientCompression (the optimizer's momentum must be 0 then, see
            `MomentumTakeover`) or HalfCompression.
        check_finite: refuse gradients that are not finite. With loss scaling, unscale before.

    Returns:
        What keeps the compressor, whose `state_dict` belongs into checkpoints.

    Raises:
        UsageError: DeepGradientCompression, and the model finds unused parameters.
    """
    if model.find_unused_parameters and isinstance(compressor, DeepGradientCompression):
        raise UsageError(
            "find_unused_parameters cannot be combined with gradient compression",
            where="register_hook",
            why="DistributedDataParallel drops the average of a parameter that no rank used, and "
            "what its residual sent would be lost",
            fix="Use paceline.training.prepare(model, optimizer, compression='dgc'), which keeps "
            "such residuals, or find_unused_parameters=False",
        )
    state = HookState(model, compressor, check_finite=check_finite)
    # torch refuses hooks whose annotations are strings, as all are in this module.
    model.register_comm_hook(state, lambda state, bucket: state.hook(bucket))
    return state


def register_powersgd(
    model: DistributedDataParallel, *, rank: int = 1, dense_steps: int = 10
) -> powerSGD_hook.PowerSGDState:
    """Let torch's PowerSGD average a model's gradients: products of two thin matrices.

    Args:
        model: without a communication hook.
        rank: of the matrices.
        dense_steps: steps at the start that average densely, at least 2.

    Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019; torch's implementation.
    """
    state = powerSGD_hook.PowerSGDState(
        model.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=dense_steps
    )
    model.register_comm_hook(state, lambda state, bucket: _powersgd(state, bucket))
    return state


def _powersgd(state: powerSGD_hook.PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        # The hook's callbacks start collectives of their own. gloo runs callbacks on threads, so
        # that those of two buckets would start theirs in another order on each rank.
        future.wait()
    return future


def is_finite(buffer: Tensor) -> bool:
    """Return whether all values are finite."""
    # A finite sum has finite terms only; one pass without a temporary. A sum may overflow.
    return bool(torch.isfinite(buffer.sum())) or bool(torch.isfinite(buffer).all())


def not_finite(named: Iterable[tuple[str, Tensor]]) -> UsageError:
    """Return the error for gradients of which at least one is not finite."""
    names = [name for name, gradient in named if not bool(torch.isfinite(gradient).all())]
    rank = dist.get_rank() if dist.is_initialized() else 0
    return UsageError(
        f"the gradient of {names[0]} is not finite",
        where=f"rank {rank}",
        why="a residual that takes an infinity or a NaN keeps it for good",
        fix="Lower the learning rate; with loss scaling, skip the step before compression",
    )
