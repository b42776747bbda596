"""A model and an optimizer that train on all ranks, and what belongs to their training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UsageError
from paceline.training.before_step import BeforeStep
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.ranks import Ranks
from paceline.training.optimizer_state import load_named_state, named_state
from paceline.training.options import TrainingOptions
from paceline.training.out_of_core.training import OutOfCore
from paceline.training.uneven import Weight, weighted_batches

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
    out_of_core: OutOfCore | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, where ranks have unequal batches or numbers of them.

        The gradients of a step are weighted by the ranks' samples, so that their average is that of
        all samples. A rank whose loader has ended repeats its last batch with the weight 0 until
        the others have ended, so that no rank waits for another. All ranks call this.

        With ``scaling="strong"`` the loaders of all ranks yield the same batches, in the same
        order, and each rank gets its part of each.

        Raises:
            UsageError: a rank has no batch at all, or with ``strong`` another batch than rank 0;
                the error names it.
        """
        device = next(self.model.parameters()).device
        divides = self.options.scaling == "strong"
        return weighted_batches(loader, self._weight, self.ranks, device, divides=divides)

    def own_samples(self, samples: int) -> int:
        """Return how many of the samples of a batch count: none of one that `batches` repeats."""
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
        load_named_state(self.optimizer, self._names(), parameters, groups)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    def _module(self) -> nn.Module:
        """Return the model whose state has no prefix."""
        is_wrapped = isinstance(self.model, DistributedDataParallel)
        return self.model.module if is_wrapped else self.model

    def _names(self) -> dict[int, str]:
        """Return the names of what the optimizer updates, by `id`."""
        if isinstance(self.model, DataParallel):
            return self.model.names_of_updated()
        return {id(parameter): name for name, parameter in self._module().named_parameters()}
