"""Batches of unequal sizes and numbers: every sample of a step counts alike.

A rank's loss is the mean over its own n_r of the N samples of a step, and gradients are averaged
over R ranks. With the weight R n_r / N on a rank's gradients the average is that over all samples:
1/R sum_r (R n_r / N) (1/n_r sum_i g_i) = 1/N sum_i g_i. It is applied where the gradient enters the
model, so that the loss which the script sees stays the rank's own mean.

With strong scaling all ranks have one batch, and rank r its rows from r N / R to (r + 1) N / R.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.training.engine.ranks import Ranks

_COMPARED_ELEMENTS = 1024  # of a tensor
_COMPARED_WHOLE = 4096  # elements of a tensor of integers, such as labels and tokens


@dataclass(slots=True)
class Weight:
    """The factor of this rank's gradients in the current step.

    Attributes:
        scale: the factor.
        is_used: whether batches are weighted at all.
        is_required: whether training without weights would be wrong.
        in_process: whether this process weighs gradients by what it sees of the batches, so that
            rebalancing, which makes them unequal, must not weigh them again.
    """

    in_process: ClassVar[bool] = False

    scale: float = 1.0
    is_used: bool = False
    is_required: bool = False

    def check_used(self) -> None:
        """Raise an error where the loop trains on the batches of another loop.

        Raises:
            UsageError: batches must be divided, and are not.
        """
        if self.is_required and not self.is_used and torch.is_grad_enabled():
            raise UsageError(
                "with strong scaling every rank would train on the whole batch",
                where="prepare(scaling='strong')",
                fix="Iterate over prepared.batches(loader) in place of the loader",
            )


def weighted_batches(
    loader: Iterable[Any],
    weight: Weight,
    ranks: Ranks,
    device: torch.device,
    *,
    divides: bool = False,
) -> Iterator[Any]:
    """Yield a loader's batches, and set the weight of each; see `Prepared.batches`.

    Cost: one all-reduce of two numbers for each rank in each step.

    Args:
        loader: of this rank.
        weight: of this rank's gradients.
        ranks: that train together.
        device: on which they communicate.
        divides: whether all loaders yield the same batches, of which each rank takes its part.

    Raises:
        UsageError: a rank has no batch at all, or another one than it must; the error names it.
    """
    if ranks.size == 1:
        yield from loader
        return
    weight.is_used = Weight.in_process = True
    last: Any = None
    for batch in _padded_forever(loader):
        has_ended = batch is _ENDED
        entries = torch.zeros(2, ranks.size, dtype=torch.int64, device=device)
        samples = -1 if has_ended and last is None else 0 if has_ended else samples_of(batch)
        entries[0, ranks.rank] = samples
        entries[1, ranks.rank] = 0 if has_ended or not divides else checksum(batch)
        dist.all_reduce(entries, group=ranks.group)
        counts, checksums = entries.tolist()
        if min(counts) < 0:
            weight.scale = 1.0
            raise UsageError(
                f"the loader of rank {counts.index(-1)} has no batch",
                fix="Give each rank at least one batch: use fewer ranks, or a smaller batch",
            )
        if divides:
            weight.scale = 1.0
            _check_equal(counts, checksums)
            batch, counts = _divided(batch, counts[0], ranks)
        total = sum(counts)
        if total == 0:
            weight.scale = 1.0
            return
        weight.scale = ranks.size * counts[ranks.rank] / total
        last = last if has_ended else batch
        yield last


def _check_equal(counts: list[int], checksums: list[int]) -> None:
    """Raise an error unless the batches of all ranks are the same, as far as their sums tell."""
    for rank, found in enumerate(zip(counts, checksums, strict=True)):
        if found == (counts[0], checksums[0]):
            continue
        why = "its values are others"
        if counts[rank] != counts[0]:
            why = f"{counts[rank]} samples on rank {rank}, {counts[0]} on rank 0"
        raise UsageError(
            f"rank {rank} has another batch than rank 0",
            where="prepare(scaling='strong')",
            why=f"every rank takes its part of the same batch; {why}",
            fix="Use no DistributedSampler, and seed shuffling and augmentation alike on all "
            "ranks: DataLoader(..., generator=torch.Generator().manual_seed(0))",
        )


def _divided(batch: Any, samples: int, ranks: Ranks) -> tuple[Any, list[int]]:
    """Return this rank's rows of a batch, and the rows of each rank.

    A rank without a row, of a batch that is smaller than the number of ranks, takes the first one
    with the weight 0.
    """
    bounds = [rank * samples // ranks.size for rank in range(ranks.size + 1)]
    counts = [end - begin for begin, end in itertools.pairwise(bounds)]
    if batch is _ENDED:
        return batch, counts
    begin, end = bounds[ranks.rank], bounds[ranks.rank + 1]
    rows = slice(begin, end) if end > begin else slice(0, 1)

    def own(leaf: Any) -> Any:
        is_whole = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == samples
        return leaf[rows] if is_whole else leaf

    return tree_map(own, batch), counts


def checksum(batch: Any) -> int:
    """Return a number of 32 bits that differs, in all likelihood, where the batch's tensors do.

    Of each tensor shape and type count, and the first and last values and those at equal distances
    between. Small tensors of integers count whole: two batches may differ in one label only.
    """
    total = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            total = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), total)
            values = _compared(leaf.detach()).cpu().contiguous()
            total = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), total)
    return total


def _compared(tensor: torch.Tensor) -> torch.Tensor:
    """Return values of all parts of a tensor, flat; no copy of a large one."""
    count = tensor.numel()
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    if count <= (_COMPARED_WHOLE if is_exact else _COMPARED_ELEMENTS):
        return tensor.reshape(-1)
    places = torch.arange(_COMPARED_ELEMENTS, device=tensor.device) * (count - 1)
    places = places.div_(_COMPARED_ELEMENTS - 1, rounding_mode="floor")
    if tensor.is_contiguous():
        return tensor.view(-1)[places]
    return tensor[torch.unravel_index(places, tensor.shape)]


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
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise UsageError(
        f"the batch, a {type(batch).__name__}, has no tensor that tells its samples",
        fix="Yield tensors, in lists, tuples or dicts, with the samples along the first dimension",
    )
