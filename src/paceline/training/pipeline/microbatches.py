"""Cuts a batch into microbatches, whose sizes differ by one sample at most."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_leaves, tree_map


def path_of(path: tuple[Any, ...]) -> str:
    """Return the path to a value among arguments as Python has it: `states[0]`."""
    text: str = path[0].key + pytree.keystr(path[1:])
    return text


def sizes_of(samples: int, microbatches: int) -> list[int]:
    """Return the samples of each microbatch; there are fewer of them than samples are too few.

    >>> sizes_of(7, 3), sizes_of(2, 4)
    ([3, 2, 2], [1, 1])
    """
    count = min(samples, microbatches)
    quotient, rest = divmod(samples, count)
    return [quotient + (place < rest) for place in range(count)]


def split(batch: Any, sizes: list[int], whole: frozenset[str] = frozenset()) -> list[Any]:
    """Return the microbatches of a batch: tensors with its samples along dim 0 are divided.

    Args:
        batch: inputs by name, or targets.
        sizes: samples of each microbatch.
        whole: paths of tensors that all microbatches get as they are, whatever their sizes.
    """
    samples = sum(sizes)
    leaves, structure = pytree.tree_flatten_with_path(batch)
    begins = [sum(sizes[:place]) for place in range(len(sizes))]

    def part(begin: int, size: int) -> Any:
        rows = (
            leaf if whole and path_of(path) in whole else _rows(leaf, samples, begin, size)
            for path, leaf in leaves
        )
        return pytree.tree_unflatten(rows, structure)

    return [part(begin, size) for begin, size in zip(begins, sizes, strict=True)]


def divided_leaves(arguments: dict[str, Any], whole: frozenset[str]) -> list[Any]:
    """Return the values of arguments that are divided; the first one tells the samples."""
    leaves, _ = pytree.tree_flatten_with_path(arguments)
    return [leaf for path, leaf in leaves if path_of(path) not in whole]


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
