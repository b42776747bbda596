"""Batch normalisation by the statistics of all replicas' batches, on CPUs and GPUs.

    rank r      n_r samples: mean m_r, squared deviations from it M_r, for each channel
    all ranks   N = sum n_r,  m = sum n_r m_r / N,  M = sum (M_r + n_r (m_r - m)^2)
    forward     y = w (x - m) / sqrt(M / N + eps) + b
    backward    dx = w / sqrt(M / N + eps) (dy - sum(dy) / N - x' sum(dy x') / N)

with x' the normalised input and the sums over the samples of all ranks. Deviations are taken from
each rank's own mean before they are put together, so that no large numbers are subtracted. The
statistics, outputs and gradients are those of one process with all samples, whatever the number of
each rank; a rank whose batch does not count (`Prepared.batches`) brings no sample.

torch's SyncBatchNorm does the same on GPUs only.
Source: T. Chan, G. Golub, R. LeVeque, Updating formulae and a pairwise algorithm for computing
sample variances, 1979 (M of two sets); S. Ioffe, C. Szegedy, Batch normalization, ICML 2015.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from paceline.core.errors import UsageError
from paceline.training.engine.exchange import BACKWARD, TRAINING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.training.engine.exchange import RowExchange
    from paceline.training.options import TrainingOptions


class BatchShare(NamedTuple):
    """What the batch of this rank is among those of all ranks.

    Attributes:
        factor: of this rank's gradients, so that each sample of all ranks has the same weight.
        counts: whether its samples are among those of the step.
    """

    factor: float = 1.0
    counts: bool = True


_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FORWARDS = {layer.forward for layer in _LAYERS}


def batch_norms(model: nn.Module, *, only_synchronised: bool = False) -> dict[str, nn.Module]:
    """Return a model's layers of batch normalisation by name, or only those of SyncBatchNorm.

    Raises:
        UsageError: a layer of a class derived from these computes something else.
    """
    wanted = nn.SyncBatchNorm if only_synchronised else _LAYERS
    layers = {}
    for name, module in model.named_modules():
        if not isinstance(module, wanted):
            continue
        if type(module).forward not in _FORWARDS:
            raise UsageError(
                f"the layer {name} has a forward pass of its own, which would be replaced",
                where=f"{type(module).__module__}.{type(module).__qualname__}",
                fix="Use torch's BatchNorm and a module of its own for what follows, or do not "
                "synchronise",
            )
        layers[name] = module
    return layers


def check_synchronised(options: TrainingOptions) -> None:
    """Raise an error for options that synchronised layers do not go with.

    Raises:
        UsageError: one is given.
    """
    if options.memory_budget is not None:
        raise UsageError(
            "a rank out of core may compute a layer again when others do not",
            where="prepare(memory_budget=...), with synchronised batch normalisation",
            why="the ranks share the statistics of their batches in each such layer",
            fix="Leave the budget out, or use a normalisation without statistics of all ranks",
        )


def use_own_batch(layers: Mapping[str, nn.Module]) -> None:
    """Have layers take the statistics of this process's batch, for a capture of the model.

    SyncBatchNorm does not run on a CPU, and on a GPU waits for other ranks.
    """
    for layer in layers.values():
        layer.forward = functools.partial(nn.modules.batchnorm._BatchNorm.forward, layer)  # noqa: SLF001  # of SyncBatchNorm's base class


class _Place(NamedTuple):
    """A layer among those that ranks share."""

    exchange: RowExchange
    number: int
    names: Sequence[str]

    def of_all(self, own: torch.Tensor, kind: int) -> torch.Tensor:
        """Return the values of all ranks, a row for each; see `RowExchange.values`."""
        every: torch.Tensor = self.exchange.values(own, (self.number, kind), self.names)
        return every


def synchronise(
    layers: Mapping[str, nn.Module], exchange: RowExchange, share: Callable[[], BatchShare]
) -> None:
    """Have layers take the statistics of all ranks' batches in training; evaluation stays local.

    Ranks that call different layers, or go backwards while others do not, all get an error.

    Args:
        layers: of `batch_norms`, the same on all ranks, and called equally often by all.
        exchange: between these ranks.
        share: returns what the batch of this step is among those of all ranks.
    """
    names = list(layers)
    for number, layer in enumerate(layers.values()):
        local = functools.partial(nn.modules.batchnorm._BatchNorm.forward, layer)  # noqa: SLF001  # of the base class of all of them
        place = _Place(exchange, number, names)
        layer.forward = functools.partial(_normalised, layer, local, place, share)


def _normalised(
    layer: Any,
    local: Callable[[torch.Tensor], torch.Tensor],
    place: _Place,
    share: Callable[[], BatchShare],
    x: torch.Tensor,
) -> torch.Tensor:
    """Return what the layer returns for this rank's part of all samples."""
    if not layer.training:
        return local(x)
    layer._check_input_dim(x)  # noqa: SLF001  # as its own forward pass
    y, mean, variance, count = _Normalise.apply(
        x, layer.weight, layer.bias, layer.eps, place, share()
    )
    if layer.track_running_stats and layer.running_mean is not None:
        _track(layer, mean, variance, count)
    return y


def _track(layer: Any, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    """Update the running statistics, with the unbiased variance, as torch's layers do."""
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        share = layer.momentum
        if share is None:
            share = 1.0 / float(layer.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)


class _Normalise(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """The normalised input, with mean, variance and number of samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        place: _Place,
        share: BatchShare,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        values, channels = x.to(wide), x.shape[1]
        dims = [dim for dim in range(x.ndim) if dim != 1]
        shape = [1, channels] + [1] * (x.ndim - 2)
        number = x.numel() // max(1, channels) if share.counts else 0
        own = values.new_zeros(2 * channels + 1)
        own[-1] = number
        if number:
            variance, mean = torch.var_mean(values, dims, correction=0)
            own[:channels], own[channels:-1] = mean, variance * number
        mean, variance, total = _combined(place.of_all(own, TRAINING), channels)
        inverse = (variance + eps).rsqrt()
        normalised = (values - mean.view(shape)) * inverse.view(shape)
        y = normalised
        if weight is not None:
            y = y * weight.to(wide).view(shape)
        if bias is not None:
            y = y + bias.to(wide).view(shape)
        ctx.save_for_backward(normalised, weight, inverse, total)
        ctx.place, ctx.has_bias, ctx.dims, ctx.shape = place, bias is not None, dims, shape
        ctx.dtype, ctx.share = x.dtype, share
        ctx.mark_non_differentiable(mean, variance, total)
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normalised, weight, inverse, total = ctx.saved_tensors
        wide = gradient.to(normalised.dtype)
        own = torch.stack([wide.sum(ctx.dims), (wide * normalised).sum(ctx.dims)])
        d_weight = own[1].to(weight.dtype) if weight is not None else None
        d_bias = own[0].to(weight.dtype) if ctx.has_bias and weight is not None else None
        d_x = None
        if ctx.needs_input_grad[0]:
            factor, counts = ctx.share
            # The same factor for each sample of all ranks, and afterwards this rank's own again.
            sums = ctx.place.of_all(own.reshape(-1) * factor, BACKWARD).sum(0).view(2, -1)
            sums = sums / (total * factor) * counts
            first, second = (value.view(ctx.shape) for value in sums)
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            d_x = (wide - first - normalised * second) * scale.view(ctx.shape)
            d_x = d_x.to(ctx.dtype)
        return d_x, d_weight, d_bias, None, None, None


def _combined(
    every: torch.Tensor, channels: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and variance of each channel, and the number of samples, of all ranks.

    Raises:
        UsageError: there is one sample, which has no variance.
    """
    counts = every[:, -1:]
    total = counts.sum()
    if float(total) <= 1:
        raise UsageError(
            "batch normalisation needs more than 1 value per channel in training",
            where="prepare(sync_batch_norm=True)",
            why="the batches of all ranks have one together",
            fix="Use larger batches",
        )
    means, squares = every[:, :channels], every[:, channels:-1]
    mean = (means * (counts / total)).sum(0)
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, variance, total
