"""Accumulates a gradient with momentum and takes the largest entries of the accumulation.

On a CPU with float32 one call of the native core does both, in one pass over memory where the
sampled threshold is good (native/include/paceline/sparsify.hpp); elsewhere torch operators do the
same, and give the same bits: `select_with_torch` is the reference of the native kernel.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline import native

_SAMPLED = 0.01  # of the elements, for the threshold
_ADAPTATIONS = 10  # of a threshold that finds too few entries
_LOWERING = 0.8  # by which each adaptation multiplies it
_ENOUGH = 0.8  # of the wanted entries


class Entries(NamedTuple):
    """Some entries of a flat tensor: ascending indices (int64), and values (float32)."""

    indices: Tensor
    values: Tensor


class Sample(NamedTuple):
    """Elements `start`, `start + stride` ...: the `wanted` largest lie above the threshold."""

    stride: int
    start: int
    wanted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """How a gradient is accumulated.

    Attributes:
        momentum: factor of the velocity.
        nesterov: whether the momentum is Nesterov's.
        mask_momentum: whether entries that are sent lose their velocity (factor masking).
    """

    momentum: float
    nesterov: bool = False
    mask_momentum: bool = True


def wanted_count(count: int, density: float) -> int:
    """Return how many of `count` elements a density takes: at least one."""
    return min(count, math.ceil(count * density))


def sample_of(count: int, density: float, name: str, step: int) -> Sample:
    """Return the sample that estimates a threshold: 1 % of the elements, and at least 2 / density.

    The stride is odd, so that it meets all columns of a matrix. The start depends on the name of
    the parameter and the step alone: a run that resumes draws the samples that it would have drawn.
    """
    least = max(math.ceil(count * _SAMPLED), math.ceil(2 / density))
    if count <= least:
        return Sample(1, 0, max(1, math.ceil(count * density)))
    stride = math.ceil(count / least / 32) * 32 + 1
    while count // stride < least and stride > 8:
        stride -= 8
    start = zlib.crc32(f"{name}:{step}".encode()) % stride
    return Sample(stride, start, max(1, math.ceil(count // stride * density)))


def accumulate_and_select(
    gradient: Tensor,
    velocity: Tensor,
    residual: Tensor,
    *,
    how: Accumulation,
    wanted: int,
    sample: Sample,
    scale: float = 1.0,
) -> Entries:
    """Add a gradient to velocity and residual; take the largest entries of the residual.

    Args:
        gradient: flat; all its values are finite.
        velocity: flat, float32; changed.
        residual: flat, float32; changed: what is taken is 0 afterwards.
        how: momentum, and whether what is taken loses it.
        wanted: the most entries to take.
        sample: for the threshold.
        scale: of the gradient, for example of local clipping.

    Returns:
        At most `wanted` entries, none of them zero.

    Cost: two streams read, two read and written, and 1 % of the elements for the sample.
    """
    gradient = gradient.to(torch.float32)
    if gradient.device.type != "cpu" or gradient.numel() >= 2**31:
        return select_with_torch(
            gradient, velocity, residual, how=how, wanted=wanted, sample=sample, scale=scale
        )
    indices = torch.empty(wanted, dtype=torch.int32)
    values = torch.empty(wanted)
    count = native.accumulate_and_select(
        gradient.contiguous().numpy(),
        velocity.numpy(),
        residual.numpy(),
        indices.numpy(),
        values.numpy(),
        stride=sample.stride,
        start=sample.start,
        sample_wanted=sample.wanted,
        scale=scale,
        factor=how.momentum,
        nesterov=how.nesterov,
        mask_momentum=how.mask_momentum,
    )
    return Entries(indices[:count].to(torch.int64), values[:count])


def add_entries(target: Tensor, entries: Entries, scale: float) -> None:
    """Add entries times `scale` to a flat float32 tensor."""
    indices, values = entries
    if target.device.type != "cpu" or target.numel() >= 2**31:
        target.index_add_(0, indices, values, alpha=scale)
        return
    native.scatter_add(
        target.numpy(), indices.to(torch.int32).numpy(), values.contiguous().numpy(), scale
    )


def accumulate(
    gradient: Tensor, velocity: Tensor, residual: Tensor, *, how: Accumulation, scale: float = 1.0
) -> None:
    """Add a gradient to velocity and residual, as `accumulate_and_select` does."""
    gradient = gradient.to(torch.float32) * scale
    if how.nesterov:
        velocity.add_(gradient).mul_(how.momentum)
        residual.add_(velocity).add_(gradient)
    else:
        velocity.mul_(how.momentum).add_(gradient)
        residual.add_(velocity)


def select_with_torch(
    gradient: Tensor,
    velocity: Tensor,
    residual: Tensor,
    *,
    how: Accumulation,
    wanted: int,
    sample: Sample,
    scale: float = 1.0,
) -> Entries:
    """Do what `accumulate_and_select` does with torch operators, on any device."""
    accumulate(gradient, velocity, residual, how=how, scale=scale)
    magnitudes = residual.abs()
    sampled = magnitudes[sample.start :: sample.stride]
    threshold = sampled.topk(min(sample.wanted, sampled.numel())).values[-1]
    for _ in range(_ADAPTATIONS + 1):
        candidates = ((magnitudes >= threshold) & (magnitudes > 0)).nonzero().squeeze(1)
        if candidates.numel() >= int(_ENOUGH * wanted):
            break
        threshold = threshold * _LOWERING
    indices = candidates[largest(magnitudes[candidates], wanted)]
    values = residual[indices]
    residual[indices] = 0
    if how.mask_momentum:
        velocity[indices] = 0
    return Entries(indices, values)


def largest(magnitudes: Tensor, wanted: int) -> Tensor:
    """Return where the `wanted` largest are, ascending; of equal ones, the first."""
    if magnitudes.numel() <= wanted:
        return torch.arange(magnitudes.numel(), device=magnitudes.device)
    least = magnitudes.topk(wanted).values[-1]
    above = magnitudes > least
    equal = magnitudes == least
    room = wanted - above.sum()
    return (above | (equal & (equal.cumsum(0) <= room))).nonzero().squeeze(1)
