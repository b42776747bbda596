"""Cuts a batch into microbatches, whose sizes differ by one sample at most."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def sizes_of(samples: int, microbatches: int) -> list[int]:
    """Return the samples of each microbatch; there are fewer of them than samples are too few.

    >>> sizes_of(7, 3), sizes_of(2, 4)
    ([3, 2, 2], [1, 1])
    """
    count = min(samples, microbatches)
    quotient, rest = divmod(samples, count)
    return [quotient + (place < rest) for place in range(count)]


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Return the microbatches of a batch: tensors with its samples along dim 0 are divided."""
    samples = sum(sizes)

    def part(begin: int, size: int) -> Any:
        return tree_map(lambda leaf: _rows(leaf, samples, begin, size), batch)

    begins = [sum(sizes[:place]) for place in range(len(sizes))]
    return [part(begin, size) for begin, size in zip(begins, sizes, strict=True)]


def _rows(leaf: Any, samples: int, begin: int, size: int) -> Any:
    is_whole = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == samples
    return leaf[begin : begin + size] if is_whole else leaf


def joined(parts: list[Any], sizes: list[int]) -> Any:
    """Return the outputs of microbatches as those of the batch; what has no samples, of the first.

    Args:
        parts: outputs of each microbatch, all of one structure.
        sizes: samples of each microbatch.
    """

    def whole(*leaves: Any) -> Any:
        divided = all(
            isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == size
            for leaf, size in zip(leaves, sizes, strict=True)
        )
        return torch.cat(leaves) if divided else leaves[0]

    return tree_map(whole, *parts)


def shape_of(batch: Any) -> tuple[Any, ...]:
    """Return what of a microbatch the shapes of all values in the model depend on."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in tree_leaves(batch)
    )
