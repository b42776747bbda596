"""Batches of unequal sizes and numbers: every sample of a step counts alike.

A rank's loss is the mean over its own n_r of the N samples of a step, and gradients are averaged
over R ranks. With the weight R n_r / N on a rank's gradients the average is that over all samples:
1/R sum_r (R n_r / N) (1/n_r sum_i g_i) = 1/N sum_i g_i. It is applied where the gradient enters the
model, so that the loss which the script sees stays the rank's own mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(slots=True)
class Weight:
    """The factor of this rank's gradients in the current step.

    Attributes:
        scale: the factor.
        is_used: whether batches are weighted at all.
    """

    scale: float = 1.0
    is_used: bool = False


def weighted_batches(
    loader: Iterable[Any], weight: Weight, group: Any, rank: int, ranks: int
) -> Iterator[Any]:
    """Yield a loader's batches, and set the weight of each; see `Prepared.batches`.

    Cost: one all-reduce of a number for each rank in each step.

    Raises:
        UsageError: a rank has no batch at all; the error names it.
    """
    if ranks == 1:
        yield from loader
        return
    weight.is_used = True
    last: Any = None
    for batch in _padded_forever(loader):
        samples = torch.zeros(ranks, dtype=torch.int64)
        has_ended = batch is _ENDED
        samples[rank] = -1 if has_ended and last is None else 0 if has_ended else samples_of(batch)
        dist.all_reduce(samples, group=group)
        counts = samples.tolist()
        if min(counts) < 0:
            weight.scale = 1.0
            raise UsageError(
                f"the loader of rank {counts.index(-1)} has no batch",
                fix="Give each rank at least one batch: use fewer ranks, or a smaller batch",
            )
        total = sum(counts)
        if total == 0:
            weight.scale = 1.0
            return
        weight.scale = ranks * counts[rank] / total
        last = last if has_ended else batch
        yield last


_ENDED = object()


def _padded_forever(loader: Iterable[Any]) -> Iterator[Any]:
    yield from loader
    while True:
        yield _ENDED


def samples_of(batch: Any) -> int:
    """Return the samples of a batch: the length of the first tensor in it.

    Raises:
        UsageError: there is no tensor with a dimension.
    """
    for leaf in torch.utils._pytree.tree_leaves(batch):  # noqa: SLF001  # torch's own loaders use it
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise UsageError(
        f"the batch, a {type(batch).__name__}, has no tensor that tells its samples",
        fix="Yield tensors, in lists, tuples or dicts, with the samples along the first dimension",
    )
