"""Torch's DistributedDataParallel as `prepare` returns it: right, or refused by name.

Torch's own takes parameters for trained that were when it was made, and reduces what the last
backward pass brought: what an earlier pass under `no_sync` left in another parameter stays with
each rank, and the ranks' parameters differ from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UsageError
from paceline.training.engine.model_wrapper import ModelWrapper

if TYPE_CHECKING:
    from torch import nn


class TorchDataParallel(ModelWrapper, DistributedDataParallel):  # type: ignore[misc]  # torch has no types here
    """A DistributedDataParallel whose state dict is that of the model, without a prefix.

    A second backward pass of one forward pass is refused: torch would not reduce it.

    Args:
        module: the model.
        accumulates: whether several passes before a step may be reduced.
        options: of DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, *, accumulates: bool = True, **options: Any) -> None:
        self.accumulates = accumulates
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        self._accumulates = False  # whether a pass since the last step was under no_sync
        self._unreduced: dict[str, nn.Parameter] = {}
        self._brought: set[str] = set()  # by backward passes since the last forward pass
        self._is_reduced = False  # whether a pass since the last step was
        super().__init__(module, **options)
        self._names = [name for name, _ in module.named_parameters()]
        self._flag_device = next(module.parameters()).device
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass a batch through the model.

        Raises:
            UsageError: a parameter that was frozen in `prepare` is not.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"{name} is trained now, and was frozen before",
                    where="the model's forward pass",
                    why="DistributedDataParallel reduces the parameters that prepare found trained",
                    fix="Unfreeze it before prepare, or use engine='allreduce'",
                )
        self._brought.clear()
        return super().forward(*args, **kwargs)

    def no_sync(self) -> Any:
        """Accumulate gradients in the rank until the first backward pass after this context."""
        self._accumulates = True
        return super().no_sync()

    def _note(self, name: str) -> Any:
        def note(parameter: nn.Parameter) -> None:
            if not self.require_backward_grad_sync:
                self._unreduced[name] = parameter
                return
            if not self._brought and self._is_reduced and not self.accumulates:
                self._check_forgotten(parameter)
            if name in self._brought:
                raise UsageError(
                    f"a second backward pass brings a gradient of {name}",
                    where="backward pass",
                    why="DistributedDataParallel reduces one for each forward pass",
                    fix="Add the losses up, or use engine='allreduce'",
                )
            self._brought.add(name)
            self._is_reduced = True
            self._unreduced.pop(name, None)

        return note

    def _check_forgotten(self, first: nn.Parameter) -> None:
        """Raise an error if averages of an earlier pass are there when a new one begins.

        Raises:
            UsageError: they are, and the compressor would take them again.
        """
        if any(p.grad is not None for p in self.module.parameters() if p is not first):
            raise UsageError(
                "compressed gradients are reduced once for each step",
                where="backward pass",
                why="an earlier backward pass was reduced already, and no step came since",
                fix="Put all but the last backward pass of a step into model.no_sync(), or train "
                "without compression",
            )

    def check_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Have each step of an optimizer refuse gradients that the ranks do not have in common.

        After passes under `no_sync` the ranks agree on it, in one small collective.
        """

        def check(*_: Any) -> None:
            self._is_reduced = False
            if not self._accumulates:
                return
            left = {name for name, p in self._unreduced.items() if p.grad is not None}
            self._unreduced.clear()
            self._accumulates = False
            numbers = [number for number, name in enumerate(self._names) if name in left]
            first = torch.tensor(min(numbers, default=len(self._names)), device=self._flag_device)
            dist.all_reduce(first, dist.ReduceOp.MIN, group=self.process_group)
            if int(first) < len(self._names):
                raise UsageError(
                    f"the gradient of {self._names[int(first)]} is that of a rank alone",
                    where="optimizer.step",
                    why="a backward pass under no_sync brought it, and DistributedDataParallel "
                    "reduces those of the last one only",
                    fix="Use the parameter in the last backward pass before a step, too (a loss of "
                    "0 * output.sum() will do), or engine='allreduce'",
                )

        optimizer.register_step_pre_hook(check)
