"""Computes the forward and backward passes of one stage, without any communication.

A stage's received values are leaves of its own autograd graph; the gradients that arrive there are
what other ranks need. Parameters collect their gradients over the microbatches as always.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import UsageError
from paceline.training.pipeline.deferred import DeferredGradients
from paceline.training.pipeline.stages import ModelStage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    Gradients = dict[str, list[torch.Tensor | None]]  # of a value's tensors, by the value's name


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOptions:
    """How stages compute.

    Attributes:
        loss_fn: takes what the model returns and the targets; returns the mean over the samples.
        scale_outputs: applied to what the model returns, before the loss.
        autocast: returns the context of the forward pass.
        recompute: whether all stages but the last compute their forward pass again.
    """

    loss_fn: Callable[[Any, Any], torch.Tensor]
    scale_outputs: Callable[[Any], Any] = lambda outputs: outputs
    autocast: Callable[[], Any] = contextlib.nullcontext
    recompute: bool = False


@dataclass(slots=True)
class _Live:
    """What a stage keeps of a microbatch from its forward to its backward pass."""

    received: dict[str, list[torch.Tensor]]
    outputs: dict[str, list[torch.Tensor]]
    weights: DeferredGradients
    loss: torch.Tensor | None = None


@dataclass(slots=True)
class StageComputing:
    """Computes one stage.

    Attributes:
        stage: that is computed.
        options: how.
        returned: what the model returned for microbatches without a backward pass.
    """

    stage: ModelStage
    options: ComputeOptions
    returned: list[Any] = field(default_factory=list)
    _live: dict[int, _Live] = field(default_factory=dict)
    _deferred: dict[int, DeferredGradients] = field(default_factory=dict)

    def forward(
        self,
        microbatch: int,
        inputs: Mapping[str, Any],
        received: Mapping[str, Any],
        loss_of: Callable[[Any], torch.Tensor] | None,
        *,
        defers: bool = False,
    ) -> dict[str, Any]:
        """Return the values that other stages use.

        In the last stage also compute the loss, or keep what the model returns.

        Args:
            microbatch: its number.
            inputs: the model's arguments.
            received: values of other stages; their tensors become leaves.
            loss_of: returns the loss of what the model returns; None: there will be no backward
                pass.
            defers: whether `backward_weight` will follow the backward pass.
        """
        leaves = {name: _leaves(value) for name, value in received.items()}
        given = [inputs[name] for name in self.stage.inputs]
        given += [received[name] for name in self.stage.received]
        deferred = DeferredGradients()
        watched = {**received, **{name: inputs[name] for name in self.stage.shared_inputs}}
        with (
            _unchanged(watched, self.stage.number),
            self.options.autocast(),
            deferred if defers else contextlib.nullcontext(),
        ):
            values = self._run(given)
        outputs = dict(zip(self.stage.outputs, values, strict=False))
        tensors = {name: _leaves(value) for name, value in outputs.items()}
        live = _Live(leaves, tensors, deferred)
        if self.stage.is_last:
            returned = tree_map(_full_precision, values[-1])
            if loss_of is None:
                self.returned.append(returned)
            else:
                live.loss = loss_of(self.options.scale_outputs(returned))
        if loss_of is not None:
            self._live[microbatch] = live
        return outputs

    def _run(self, given: list[Any]) -> Any:
        module = self.stage.module
        if not self.options.recompute or self.stage.is_last or not torch.is_grad_enabled():
            return module(*given)
        contexts = functools.partial(_contexts, module)
        return checkpoint(module, *given, use_reentrant=False, context_fn=contexts)

    def loss(self, microbatch: int) -> torch.Tensor:
        """Return the weighted loss of a microbatch whose backward pass is still to come."""
        loss = self._live[microbatch].loss
        assert loss is not None
        return loss.detach()

    def backward(self, microbatch: int, gradients: Mapping[str, Sequence[Any]]) -> Gradients:
        """Return the gradients of the received values; None for a tensor that has none.

        Args:
            microbatch: whose forward pass this stage has computed.
            gradients: of each output's tensors, summed over the stages that use it.
        """
        live = self._live.pop(microbatch)
        if live.weights.is_used:
            self._deferred[microbatch] = live.weights
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor | None] = []
        for name, tensors in live.outputs.items():
            for tensor, gradient in zip(tensors, gradients[name], strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    seeds.append(gradient)
        if live.loss is not None and live.loss.requires_grad:
            roots.append(live.loss)
            seeds.append(None)
        if roots:
            torch.autograd.backward(roots, seeds)
        return {name: [leaf.grad for leaf in leaves] for name, leaves in live.received.items()}

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradients of parameters that `backward` left out."""
        deferred = self._deferred.pop(microbatch, None)
        if deferred is not None:
            deferred.compute()

    def forget(self) -> None:
        """Drop what a step that failed left behind."""
        self.returned.clear()
        for deferred in (*(live.weights for live in self._live.values()), *self._deferred.values()):
            deferred.clear()
        self._live.clear()
        self._deferred.clear()


@contextlib.contextmanager
def _unchanged(values: Mapping[str, Any], stage: int) -> Iterator[None]:
    """Refuse a change in place of what other stages have too: theirs would stay as it was.

    Raises:
        UsageError: a tensor was changed.
    """
    before = {name: _versions(value) for name, value in values.items()}

    def error(names: str) -> UsageError:
        return UsageError(
            f"stage {stage} changes {names} in place, which another stage has too",
            where=f"stage {stage}",
            why="each stage has a copy of its own, and the other one would stay as it was",
            fix="Change a clone, or choose other sizes of the partitions",
        )

    try:
        yield
    except RuntimeError as problem:
        if "leaf Variable that requires grad" not in str(problem):
            raise
        raise error(" or ".join(values)) from problem
    for name, value in values.items():
        if _versions(value) != before[name]:
            raise error(name)


def _versions(value: Any) -> list[int]:
    tensors = [leaf for leaf in _leaves(value) if not leaf.is_inference()]  # those count nothing
    return [tensor._version for tensor in tensors]  # noqa: SLF001  # its only name


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    """Return the contexts of a forward pass, and of the same one when it is computed again."""
    return contextlib.nullcontext(), unchanged_buffers(module)


@contextlib.contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Leave buffers as they are, such as statistics that have seen the microbatch already."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


def _leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _full_precision(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
