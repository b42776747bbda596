"""What rebalancing does in a backward pass: weighs its gradients, and notes when they are there.

Gradients are averaged over ranks, each the mean over n_r of the N samples of a step: with the
weight R n_r / N the average over R ranks is that over all samples (`training.uneven` has the sum).
The weight enters at the root of the backward pass, so that it holds for each batch of a step that
accumulates several, for models in a chain, and under any communication hook, compression or
hand-written all-reduce; the loss that the script reads stays the rank's own mean.

A backward pass of DistributedDataParallel ends when the gradients of all ranks have arrived. What
the engine calls at the end of the pass is called in the order in which it was queued, and ours is
queued at the root, before any gradient is there: it comes before the wait for other ranks.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.trace.collectors.hook_registry import HookRegistry

_SUM = 2  # what losses keep as their reduction, see torch.nn._reduction
_REDUCTIONS = ("SumBackward", "MeanBackward")
_SCALES = ("DivBackward", "MulBackward", "NegBackward")
_DDP_OUTPUTS = "_DDPSinkBackward"  # of a model that computes its loss itself, as transformers do
_CARRIERS = (*_SCALES, _DDP_OUTPUTS, "ToCopyBackward", "CloneBackward", "ViewBackward", "Squeeze")
_DEEPEST = 16  # operators between the root and a loss's reduction


class WeighedBackward:
    """Replaces `torch.autograd.backward`, which `Tensor.backward` calls.

    Args:
        begin: called with the roots of an outermost pass of the main thread; returns the weight of
            its gradients.
        ready: called when all gradients of that pass are computed, before it waits for others.
        end: called after it.
    """

    def __init__(
        self,
        begin: Callable[[tuple[torch.Tensor, ...]], float],
        ready: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._begin = begin
        self._ready = ready
        self._end = end
        self._thread = threading.get_ident()
        # A pass may run another one, as reentrant checkpoints do, in another thread of the engine.
        self._is_inside = False

    def install(self, hooks: HookRegistry) -> None:
        """Replace it, until the hooks are taken out."""
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_inside or threading.get_ident() != self._thread:
                original(tensors, *args, **kwargs)
                return
            roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            weight = self._begin(roots)
            handles = [root.register_hook(self._hook(weight)) for root in roots if _has_hooks(root)]
            self._is_inside = True
            try:
                original(roots, *args, **kwargs)
            finally:
                self._is_inside = False
                for handle in handles:
                    handle.remove()
            self._end()

        hooks.replace(torch.autograd, "backward", backward)

    def _hook(self, weight: float) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def at_root(gradient: torch.Tensor) -> torch.Tensor | None:
            torch.autograd.Variable._execution_engine.queue_callback(self._ready)  # noqa: SLF001  # as FSDP2 does
            return None if weight == 1.0 else gradient * weight

        return at_root


def _has_hooks(root: Any) -> bool:
    return isinstance(root, torch.Tensor) and root.requires_grad


def adds_samples_up(root: torch.Tensor, samples: int) -> bool:
    """Return whether a loss is a sum over samples, whose gradients need no weights.

    Seen are losses of torch with reduction="sum", and sums over a tensor whose first dimension has
    the samples. So is one that is divided as a whole: by samples of its own it would need weights,
    by those of all ranks it would not, and which it is does not show.

    Args:
        root: the loss.
        samples: of the batch.
    """
    node, output, depth = root.grad_fn, root.output_nr, 0
    while node is not None and node.name().startswith(_CARRIERS) and depth < _DEEPEST:
        # What DistributedDataParallel hands out has as many outputs as inputs; others have one.
        inputs = node.next_functions
        if node.name() == _DDP_OUTPUTS:
            node, output = inputs[output]
        else:
            node, output = next((edge for edge in inputs if edge[0] is not None), (None, 0))
        depth += 1
    return any(_adds_up(node, samples) for node in _reductions(node, depth))


def _reductions(node: Any, depth: int) -> Iterator[Any]:
    """Yield the operators that reduce to a number, from the root as far as numbers go."""
    if node is None or depth > _DEEPEST:
        return
    if hasattr(node, "_saved_reduction") or node.name().startswith(_REDUCTIONS):
        yield node
    elif not node.name().startswith(_SCALES):  # a penalty that is weighed is no loss
        for inner, _ in node.next_functions:
            yield from _reductions(inner, depth + 1)


def _adds_up(node: Any, samples: int) -> bool:
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return bool(reduction == _SUM)
    sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
    return node.name().startswith("SumBackward") and sizes[:1] == (samples,) and samples > 1
