"""A model and an optimizer that train on all ranks, and what belongs to their training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UsageError
from paceline.training.before_step import BeforeStep
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.ranks import Ranks
from paceline.training.optimizer_state import load_named_state, named_state
from paceline.training.options import TrainingOptions
from paceline.training.out_of_core.training import OutOfCore
from paceline.training.pipeline.graph import bind_inputs
from paceline.training.pipeline.microbatches import sizes_of, split
from paceline.training.pipeline.parallel import PipelineParallel
from paceline.training.tensor_parallel import TensorParallel
from paceline.training.uneven import Weight, samples_of, weighted_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_STATE_VERSION = 1


@dataclass(slots=True)
class Prepared:
    """A model and an optimizer that train on all ranks. Unpacks into the two.

    Attributes:
        model: to pass batches through.
        optimizer: the one that was given.
        options: that are in use.
        before_step: counts steps, also those that a gradient which was not finite prevented.
        ranks: that train together.
        out_of_core: what keeps this rank within its ``memory_budget``, if it has one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    options: TrainingOptions
    before_step: BeforeStep
    ranks: Ranks
    _weight: Weight
    _parts: dict[str, Any] = field(default_factory=dict)
    _loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    out_of_core: OutOfCore | None = None
    _tensor_parallel: TensorParallel | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer))

    def forward_backward(self, inputs: Any, target: Any) -> torch.Tensor:
        """Run a batch forwards and backwards; return the mean loss over the batches of all ranks.

        `optimizer.step()` follows, and `optimizer.zero_grad()` stands before, as always. Where the
        model is divided, the ranks of one replica pass the same batch. All ranks call this.

        Args:
            inputs: a tensor, a tuple of positional arguments, or a dict of arguments by name.
            target: for the loss.

        Returns:
            Shape (), without a gradient, on all ranks the same.

        Raises:
            UsageError: `prepare` got no `loss_fn`, or the model does not take the inputs.
            RankLost: another rank ended, or does not answer; the error names it.
        """
        if isinstance(self.model, PipelineParallel):
            mean = self.model.forward_backward(inputs, target)
        else:
            mean = self._on_all_ranks(inputs, target)
        self.before_step.show_loss(mean)
        return mean

    def _on_all_ranks(self, inputs: Any, target: Any) -> torch.Tensor:
        if self._loss_fn is None:
            raise UsageError(
                "the loss is not known",
                where="Prepared.forward_backward",
                fix="Give loss_fn to prepare, or write the forward and backward pass yourself",
            )
        with self._weighted(samples_of(inputs)) as samples:
            loss = self._passes(inputs, target, self._loss_fn)
        if self.ranks.size == 1:
            return loss
        # The mean over no samples is not a number.
        value = loss.double() * samples if samples else loss.new_zeros(()).double()
        totals = torch.stack([value, loss.new_tensor(samples).double()])
        dist.all_reduce(totals, group=self.ranks.group)
        return (totals[0] / totals[1]).to(loss.dtype)

    def _passes(self, inputs: Any, target: Any, loss_fn: Callable[..., Any]) -> torch.Tensor:
        """Run a batch in as many passes as were planned; return its mean loss on this rank.

        Ranks reduce gradients in the last pass; before it, each adds them up.
        """
        samples = samples_of(inputs)
        sizes = sizes_of(samples, self.options.microbatches or 1)
        if len(sizes) < 2:
            loss: torch.Tensor = loss_fn(self.outputs(inputs), target)
            loss.backward()
            return loss.detach()
        # fsdp2 has no such context: it reduces in each pass.
        alone = getattr(self.model, "no_sync", contextlib.nullcontext)
        parts = list(zip(split(inputs, sizes), split(target, sizes), sizes, strict=True))
        total = torch.zeros(())
        for number, (some_inputs, some_target, size) in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last else alone():
                part = loss_fn(self.outputs(some_inputs), some_target) * (size / samples)
                part.backward()
            total = total.to(part) + part.detach()
        return total

    def outputs(self, inputs: Any) -> Any:
        """Return what the model returns for inputs as `forward_backward` takes them.

        Raises:
            UsageError: the model does not take them.
        """
        arguments = bind_inputs(self._given(), inputs)
        return self.model(*arguments.args, **arguments.kwargs)

    @contextlib.contextmanager
    def _weighted(self, samples: int) -> Iterator[int]:
        """Weigh the gradients of this rank's samples, unless `batches` does; yield what counts."""
        if self.ranks.size == 1 or self._weight.is_used:
            yield self.own_samples(samples)
            return
        device = next(self.model.parameters()).device
        total = torch.tensor([samples], device=device)
        dist.all_reduce(total, group=self.ranks.group)
        self._weight.scale, self._weight.is_used = self.ranks.size * samples / int(total), True
        Weight.in_process = True
        try:
            yield samples
        finally:
            self._weight.scale, self._weight.is_used = 1.0, False

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, where ranks have unequal batches or numbers of them.

        The gradients of a step are weighted by the ranks' samples, so that their average is that of
        all samples. A rank whose loader has ended repeats its last batch with the weight 0 until
        the others have ended, so that no rank waits for another. All ranks call this.

        Where the model is divided, batches come as they are: all replicas have equally many.

        With ``scaling="strong"`` the loaders of all ranks yield the same batches, in the same
        order, and each rank gets its part of each.

        Raises:
            UsageError: a rank has no batch at all, or with ``strong`` another batch than rank 0;
                the error names it.
        """
        if self.is_divided:
            yield from loader
            return
        device = next(self.model.parameters()).device
        divides = self.options.scaling == "strong"
        yield from weighted_batches(loader, self._weight, self.ranks, device, divides=divides)

    @property
    def is_divided(self) -> bool:
        """Whether this rank has only some of the model's layers."""
        return isinstance(self.model, PipelineParallel)

    @property
    def replicas(self) -> int:
        """Number of replicas of the model, each of which gets other batches."""
        return self.model.mesh.replicas if self.is_divided else self.ranks.size

    @property
    def replica(self) -> int:
        """Number of the replica that this rank is, or is a part of."""
        return self.model.mesh.replica if self.is_divided else self.ranks.rank

    def own_samples(self, samples: int) -> int:
        """Return how many of the samples of a batch count on this rank.

        None of a batch that `batches` repeats; those of a divided model's batch on one of its
        ranks.
        """
        if isinstance(self.model, PipelineParallel):
            return samples if self.model.mesh.place == 0 else 0
        return samples if self._weight.scale else 0

    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs to go on: model, optimizer, loss scale, residuals.

        What belongs to parameters is keyed by their names in the model that was given, and whole,
        except under ``fsdp2``, whose tensors are DTensors, and for ``compression``, whose residuals
        are this rank's own: with these two save it on each rank, otherwise rank 0's will do. The
        tensors are not copies. All ranks call this.
        """
        state, groups = named_state(self.optimizer, self._names())
        if isinstance(self.model, DataParallel):
            state = self.model.mode.whole_state(state)
        if self._tensor_parallel is not None:
            state = self._tensor_parallel.states.whole_state(state)
        if isinstance(self.model, PipelineParallel):
            state, groups = self.model.whole_optimizer(state, groups)
        return {
            "version": _STATE_VERSION,
            "ranks": self.ranks.size,
            "model": self._module().state_dict(),
            "optimizer": {"state": state, "groups": groups},
            **{name: part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            UsageError: it is of other options or parameters, or with compression of another number
                of ranks.
        """
        own = {"version", "ranks", "model", "optimizer", *self._parts}
        if state.get("version") != _STATE_VERSION or set(state) != own:
            raise UsageError(
                f"the state has {sorted(state)}, and this training {sorted(own)}",
                where="Prepared.load_state_dict",
                fix="Prepare with the options with which the state was saved",
            )
        if state["ranks"] != self.ranks.size and "compression" in self._parts:
            raise UsageError(
                f"the state is of {state['ranks']} ranks, and {self.ranks.size} train",
                where="Prepared.load_state_dict",
                why="each rank's residuals of compressed gradients are its own",
                fix="Start as many ranks as before",
            )
        self._module().load_state_dict(state["model"])
        parameters, groups = state["optimizer"]["state"], state["optimizer"]["groups"]
        if isinstance(self.model, DataParallel):
            parameters = self.model.mode.own_state(parameters)
        if self._tensor_parallel is not None:
            parameters = self._tensor_parallel.states.own_state(parameters)
        if isinstance(self.model, PipelineParallel):
            parameters, groups = self.model.own_optimizer(parameters, groups)
        load_named_state(self.optimizer, self._names(), parameters, groups)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    def _module(self) -> nn.Module:
        """Return the model whose state has no prefix."""
        is_wrapped = isinstance(self.model, DistributedDataParallel)
        return self.model.module if is_wrapped else self.model

    def _given(self) -> nn.Module:
        """Return the model that was given to `prepare`, whose arguments are known by name."""
        is_wrapped = isinstance(self.model, DistributedDataParallel | DataParallel)
        return self.model.module if is_wrapped else self.model

    def _names(self) -> dict[int, str]:
        """Return the names of what the optimizer updates, by `id`."""
        if isinstance(self.model, DataParallel):
            return self.model.names_of_updated()
        return {id(parameter): name for name, parameter in self._module().named_parameters()}
