"""Weights in fp16 or bf16, with fp32 masters that the optimizer changes.

An update below 1/512 of a bf16 weight (1/4,096 of an fp16 one) is lost when it is added to the
weight itself. The optimizer therefore adds it to an fp32 copy, which is then rounded into the
model::

    model's gradients -> gather -> fp32 gradients of the masters -> step
    model's weights  <- scatter <- fp32 masters                  <-

With torch.autocast the model itself keeps fp32 weights, and none of this is needed. Masters save
the casts of each forward pass and halve the bytes of gradients, at 4 bytes per parameter.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_LOW = (torch.float16, torch.bfloat16)


class MasterWeights:
    """fp32 copies of a model's fp16 and bf16 parameters, which an optimizer has in their place."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put masters into the optimizer's groups; other parameters stay.

        Raises:
            UsageError: the optimizer has taken steps already, or has a parameter that the model
                does not.
        """
        names = {parameter: name for name, parameter in model.named_parameters()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer.state or any(p not in names for p in parameters):
            raise UsageError(
                "master weights need an optimizer of this model's parameters, without steps",
                fix="Make the optimizer of model.parameters(), then MasterWeights at once",
            )
        self.masters: dict[str, nn.Parameter] = {
            names[p]: nn.Parameter(p.detach().float().clone())
            for p in parameters
            if p.dtype in _LOW
        }
        self._weights = {names[p]: p for p in parameters if names[p] in self.masters}
        for group in optimizer.param_groups:
            group["params"] = [self.masters.get(names[p], p) for p in group["params"]]

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed for us
    def gather(self) -> None:
        """Move the model's gradients to the masters, as fp32."""
        for name, weight in self._weights.items():
            self.masters[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed for us
    def scatter(self) -> None:
        """Round the masters into the model's weights."""
        torch._foreach_copy_(list(self._weights.values()), list(self.masters.values()))

    def attach(self, optimizer: Optimizer) -> None:
        """Gather before each step and scatter after it; attach a LossScaler afterwards."""
        optimizer.register_step_pre_hook(lambda *_: self.gather())
        optimizer.register_step_post_hook(lambda *_: self.scatter())

    def state_dict(self) -> dict[str, Any]:
        """Return the masters by parameter name; the model has lost their last bits."""
        return {name: master.detach() for name, master in self.masters.items()}

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed for us
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the masters, and the model's weights from them.

        Raises:
            UsageError: the names are not this model's.
        """
        if state.keys() != self.masters.keys():
            different = sorted(state.keys() ^ self.masters.keys())
            raise UsageError(
                "the master weights are those of another model",
                why=f"the first name that only one of both has is {different[0]!r}",
                fix="Load the checkpoint into the model that wrote it",
            )
        for name, master in self.masters.items():
            master.copy_(state[name])
        self.scatter()
