"""What happens between the backward pass and the optimizer's update, in this order.

    unscale     gradients are divided by the scale of the loss
    agree       a gradient that is not finite on one rank: no rank updates, and no state is touched
    watch       rank 0 says if the loss, or its own gradients, grow as in a training that diverges
    clip        by the norm of all gradients of all layers
    update      the optimizer's own; LARS and LAMB take their norms there

Sources: P. Micikevicius et al., Mixed Precision Training, ICLR 2018; R. Pascanu et al., On the
difficulty of training recurrent neural networks, ICML 2013 (clipping).
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from paceline.training.engine.ranks import Ranks
    from paceline.training.health import Divergence, DivergenceAlarm, GradientCheck
    from paceline.training.optimizers.norms import LayerNorms
    from paceline.training.precision.scaling import LossScaler

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


class BeforeStep:
    """Runs before each step of an optimizer, which stays the user's own.

    Args:
        optimizer: whose steps these are.
        ranks: that train together; each calls `step` equally often.
        scaler: of the loss; one that is not enabled checks the gradients only.
        check: that saw the gradients of this rank before they were reduced.
        norms: of layers of which this rank may have a part.
        clip_norm: the most that the norm of all gradients may be, or None.
        alarm: that this rank's gradients and loss are shown to, or None.

    Attributes:
        step: steps so far, with those that were skipped.
        skipped: steps that a gradient which was not finite prevented.
        is_skipped: whether the last step was one of them.
        divergences: what the alarm said, of this rank.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        *,
        scaler: LossScaler,
        check: GradientCheck,
        norms: LayerNorms,
        clip_norm: float | None = None,
        alarm: DivergenceAlarm | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(
                f"clip_norm must be more than 0, got {clip_norm}", fix="Give None for no clipping"
            )
        self.step = 0
        self.skipped = 0
        self.is_skipped = False
        self.divergences: list[Divergence] = []
        self._loss: torch.Tensor | None = None
        self._ranks = ranks
        self._scaler, self._check, self._norms = scaler, check, norms
        self._clip_norm, self._alarm = clip_norm, alarm
        optimizer.register_step_pre_hook(self._run)

    def show_loss(self, loss: torch.Tensor) -> None:
        """Let the alarm see the loss of the coming step; it is read in that step."""
        self._loss = loss.detach()

    def _run(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # The first of `args` is the optimizer; wrappers of it pass None for no closure.
        has_closure = any(argument is not None for argument in (*args[1:], kwargs.get("closure")))
        if has_closure and (self._clip_norm is not None or self._scaler.enabled):
            raise UsageError(
                "gradients of a closure can be neither clipped nor unscaled",
                where="optimizer.step(closure)",
                why="the optimizer calls it, and uses its gradients, in the step",
                fix="Call the closure before optimizer.step(), or leave out clip_norm and float16",
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        flag, scale = self._check.flag(), self._scaler.scale
        is_bad = self._scaler.unscale_and_check(parameters, self._ranks.group, found=flag)
        self._scaler.update(is_bad)
        self.is_skipped = is_bad
        if is_bad:
            self._skip(parameters)
        else:
            self._watch(scale)
            if self._clip_norm is not None:
                self._clip([p for p in parameters if p.grad is not None], self._clip_norm)
        self._check.reset()
        self.step += 1

    def _skip(self, parameters: list[nn.Parameter]) -> None:
        """Leave the step out; an error where a smaller scale would not help.

        Raises:
            PacelineError: a gradient is not finite; the error names rank, step and layer.
        """
        self.skipped += 1
        for parameter in parameters:
            parameter.grad = None
        culprits = self._check.culprits(self.step, self._ranks.group)
        if self._scaler.is_exhausted:
            self._check.reset()
            if culprits:
                raise culprits[0].error()
            raise PacelineError(
                "the reduced gradients are not finite, while those of each rank were",
                where=f"step {self.step}",
                why="their sum over the ranks is larger than its type holds",
                fix="Lower the learning rate, or train in bfloat16 or float32",
            )

    def _watch(self, scale: float) -> None:
        """Show the alarm the gradients of this rank, divided by the scale that they came with."""
        if self._alarm is None:
            return
        loss, self._loss = self._loss, None
        divergence = self._alarm.observe(
            self.step,
            loss=None if loss is None else float(loss),
            gradient_norms=self._check.norms(scale),
        )
        if divergence is not None:
            self.divergences.append(divergence)
            if self._ranks.rank == 0:
                sys.stderr.write(f"{divergence}\n")

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch has no types here
    def _clip(self, parameters: list[nn.Parameter], most: float) -> None:
        # Ranks without any gradient call it too: the norm may be one of all ranks.
        gradients = [parameter.grad for parameter in parameters]
        norm = math.sqrt(float(self._norms.total(gradients, parameters)))
        factor = most / (norm + _CLIP_EPS)
        if gradients and factor < 1:
            torch._foreach_mul_(gradients, factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, and the state of the loss scaling and of the alarm."""
        state = {"step": self.step, "skipped": self.skipped, "scaler": self._scaler.state_dict()}
        if self._alarm is not None:
            state["alarm"] = self._alarm.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.step, self.skipped = int(state["step"]), int(state["skipped"])
        self._scaler.load_state_dict(state["scaler"])
        if self._alarm is not None and "alarm" in state:
            self._alarm.load_state_dict(state["alarm"])


def watch_gradients(named: list[tuple[str, nn.Parameter]], check: GradientCheck) -> None:
    """Let a check see each gradient before torch's DistributedDataParallel reduces it."""

    def watcher(name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: check.observe([name], [gradient])

    for name, parameter in named:
        parameter.register_hook(watcher(name))
