"""Finds which inputs of a model have the samples of the batch along their first dim.

    forward(tokens, mask)      tokens  [8, 16]     samples, places
                               mask    [16, 16]    places, places: for all microbatches the same

Sizes alone do not tell: a batch of 16 samples has a mask of 16 rows as well, and a row of the mask
broadcasts where it is wrong. So the example runs once more, without memory, with another number of
samples: where the mask gets more rows too, its rows do not fit the places any more.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from paceline.training.pipeline.computing import unchanged_buffers
from paceline.training.pipeline.exported import named_arguments, quiet
from paceline.training.pipeline.graph import bind_inputs
from paceline.training.pipeline.microbatches import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.training.pipeline.graph import CapturedGraph

_MOST = 6  # inputs of one size: each subset of them is a run


def inputs_without_samples(captured: CapturedGraph, inputs: Any) -> frozenset[str]:
    """Return the paths of the tensors that all microbatches get whole, as far as that is known.

    Args:
        captured: the graph of the model.
        inputs: an example, as the model takes it; it is not computed with. None: none is known.
    """
    if inputs is None:
        return frozenset()
    arguments = named_arguments(bind_inputs(captured.root, inputs))
    leaves, _ = pytree.tree_flatten_with_path(arguments)
    sizes = {
        path_of(path): leaf.shape[0]
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.ndim
    }
    if len(sizes) < 2 or not _runs(captured, arguments, frozenset()):
        return frozenset()
    for divided in _subsets(sizes):
        if _runs(captured, arguments, divided):
            return frozenset(sizes) - divided
    return frozenset()


def _subsets(sizes: dict[str, int]) -> Iterator[frozenset[str]]:
    """Yield sets of inputs of one size: of the first one's before others, large before small."""
    for size in dict.fromkeys(sizes.values()):
        group = [name for name, own in sizes.items() if own == size]
        counts = range(len(group), 0, -1) if len(group) <= _MOST else [len(group)]
        for count in counts:
            yield from map(frozenset, itertools.combinations(group, count))


def _runs(captured: CapturedGraph, arguments: dict[str, Any], divided: frozenset[str]) -> bool:
    """Return whether the graph runs with other numbers of rows of some inputs."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    rows = 1 + max(size for tensor in tensors for size in tensor.shape)  # no other size
    module = captured.module()
    try:
        # A buffer that meets no tensor without memory is changed for real.
        with (
            quiet(),
            unchanged_buffers(module),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            torch.no_grad(),
        ):

            def fake(path: Any, leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                value = mode.from_tensor(leaf)
                return value.new_empty(rows, *value.shape[1:]) if path in divided else value

            given = pytree.tree_map_with_path(lambda path, x: fake(path_of(path), x), arguments)
            fx.Interpreter(module).run(*(given[name] for name in captured.inputs))
    except Exception:  # noqa: BLE001  # whatever an operator raises for sizes that do not fit
        return False
    return True
