"""Takes momentum away from the user's SGD, since compressed gradients have it already.

Weight decay keeps a momentum of its own, on every rank, so that nothing is sent for it: with both,
uncompressed training takes exactly the steps that it took before. With d = decay * parameter:

    b = m b + d;    gradient += b          Nesterov: gradient += d + m b
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_STATE_VERSION = 1


class MomentumTakeover:
    """Sets momentum and weight decay of a ``torch.optim.SGD`` to 0 and adds the decay itself.

    The optimizer stays the user's own, with its learning rates and schedulers. Use `momentum` and
    `nesterov` for the compressor. Before the optimizer's first step.

    Args:
        optimizer: a ``torch.optim.SGD``.
        named_parameters: of the unwrapped model.

    Raises:
        UsageError: not SGD, dampening, `maximize`, or groups with different momenta.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
    ) -> None:
        groups = optimizer.param_groups
        _check(optimizer)
        self.momentum = float(groups[0]["momentum"])
        self.nesterov = bool(groups[0]["nesterov"])
        self._names = {id(parameter): name for name, parameter in named_parameters}
        self._decays = [float(group["weight_decay"]) for group in groups]
        self._velocity: dict[str, Tensor] = {}
        for group in groups:
            group.update(momentum=0.0, nesterov=False, weight_decay=0.0)
        self._hook = optimizer.register_step_pre_hook(self._add_decay)

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its momentum and weight decay back; its velocity starts at 0."""
        self._hook.remove()
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            group.update(momentum=self.momentum, nesterov=self.nesterov, weight_decay=decay)

    def state_dict(self) -> dict[str, Any]:
        """Return the decay's velocities by parameter name; the tensors are not copies."""
        return {"version": _STATE_VERSION, "velocity": dict(self._velocity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned; copies the tensors."""
        assert state["version"] == _STATE_VERSION, "a state of this version"
        self._velocity = {name: value.clone() for name, value in state["velocity"].items()}

    def _add_decay(
        self, optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]
    ) -> None:
        with torch.no_grad():
            for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
                for parameter in group["params"] if decay else ():
                    if parameter.grad is not None:
                        self._add_to(parameter.grad, parameter, decay)

    def _add_to(self, gradient: Tensor, parameter: Tensor, decay: float) -> None:
        name = self._names[id(parameter)]
        velocity = self._velocity.get(name)
        if velocity is None:
            velocity = self._velocity[name] = torch.zeros_like(parameter)
        velocity.mul_(self.momentum).add_(parameter, alpha=decay)
        if self.nesterov:
            gradient.add_(parameter, alpha=decay).add_(velocity, alpha=self.momentum)
        else:
            gradient.add_(velocity)


def _check(optimizer: torch.optim.Optimizer) -> None:
    where = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.SGD):
        raise UsageError(
            "gradient compression with momentum correction needs torch.optim.SGD",
            where=where,
            why="the momentum of other optimizers is not linear in the gradients",
            fix="Use SGD, PowerSGD (register_powersgd), or 16 bits on the wire (HalfCompression)",
        )
    groups = optimizer.param_groups
    if any(group["dampening"] or group["maximize"] for group in groups):
        raise UsageError(
            "dampening and maximize cannot be combined with momentum correction",
            where=where,
            fix="Set dampening=0 and maximize=False",
        )
    if len({(group["momentum"], group["nesterov"]) for group in groups}) > 1:
        raise UsageError(
            "all parameter groups need one momentum for gradient compression",
            where=where,
            fix="Give all parameter groups the same momentum and nesterov",
        )
