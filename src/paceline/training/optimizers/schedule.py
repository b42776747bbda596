r"""Learning rates for a batch that is larger than the one a rate was tuned for.

    rate
      k |      /\
        |    /    \__           k = batch / reference, or its square root
      1 |  /         \____
        |_/_______________\___  steps
          warm-up    decay

The reference rate is the optimizer's own `lr`; the schedule multiplies it. What torch has, torch
does (constant, cosine, polynomial, sequences of schedules); it lacks a warm-up and a decay that are
stated by batch and epochs, and a schedule that does not advance when a step was skipped.

Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.1 (linear scaling), 2.2
(gradual warm-up); Krizhevsky, One weird trick, 2014 (square root); You et al. 2017 (polynomial).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.optim.lr_scheduler import LambdaLR

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

Rule = Literal["linear", "square-root", "none"]
Decay = Literal["polynomial", "cosine", "constant"]


def linear_scaling(batch: float, reference_batch: float) -> float:
    """Return the factor of the rate for a larger batch: k times the samples, k times the rate.

    It keeps the expected movement per sample, as long as weights change little within k steps.

    >>> linear_scaling(8192, 256)
    32.0
    """
    return batch / reference_batch


def square_root_scaling(batch: float, reference_batch: float) -> float:
    """Return the factor of the rate that keeps the variance of an update per sample.

    >>> square_root_scaling(1024, 256)
    2.0
    """
    return math.sqrt(batch / reference_batch)


_RULES: dict[str, Callable[[float, float], float]] = {
    "linear": linear_scaling,
    "square-root": square_root_scaling,
    "none": lambda _batch, _reference: 1.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeBatchRate:
    """The factor of the reference rate at each step.

    Attributes:
        batch: global batch, in samples: all ranks, all accumulated passes.
        reference_batch: the global batch for which the optimizer's `lr` was tuned.
        epochs: length of the training.
        steps_per_epoch: optimizer steps in an epoch at this batch; not a whole number where a
            batch crosses the end of an epoch.
        warmup_epochs: length of the warm-up, part of `epochs`.
        warmup_from: factor that the warm-up rises from; 1 is the reference rate itself.
        rule: how the rate grows with the batch.
        decay: its course from the end of the warm-up to the end of the training.
        power: of the polynomial decay.
    """

    batch: int
    reference_batch: int
    epochs: float
    steps_per_epoch: float
    warmup_epochs: float = 5.0
    warmup_from: float = 1.0
    rule: Rule = "linear"
    decay: Decay = "polynomial"
    power: float = 2.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: a value is impossible.
        """
        for name in ("batch", "reference_batch", "epochs", "steps_per_epoch"):
            if not getattr(self, name) > 0:
                raise UsageError(
                    f"{name} must be more than 0, got {getattr(self, name)}",
                    fix=f"Pass another {name}",
                )
        if not 0 <= self.warmup_epochs <= self.epochs:
            raise UsageError(
                f"warmup_epochs must be from 0 to epochs ({self.epochs:g}), "
                f"got {self.warmup_epochs:g}",
                fix="Shorten the warm-up or train for more epochs",
            )
        for name, choices in (("rule", _RULES), ("decay", _DECAYS)):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"no {name} is called {getattr(self, name)!r}",
                    fix=f"Choose one of {', '.join(choices)}",
                )

    @property
    def peak(self) -> float:
        """The factor at the end of the warm-up."""
        return _RULES[self.rule](self.batch, self.reference_batch)

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return round(self.warmup_epochs * self.steps_per_epoch)

    @property
    def steps(self) -> int:
        """Steps of the training."""
        return round(self.epochs * self.steps_per_epoch)

    def factor(self, step: int) -> float:
        """Return the factor of the reference rate at a step, counted from 0.

        The last step of the warm-up is the first with the full rate; no step has the rate 0 before
        the end of the training.
        """
        if step < self.warmup_steps:
            share = (step + 1) / self.warmup_steps
            return self.warmup_from + (self.peak - self.warmup_from) * share
        length = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / length)
        return self.peak * _DECAYS[self.decay](progress, self.power)


_DECAYS: dict[str, Callable[[float, float], float]] = {
    "polynomial": lambda progress, power: (1 - progress) ** power,
    "cosine": lambda progress, _power: (1 + math.cos(math.pi * progress)) / 2,
    "constant": lambda _progress, _power: 1.0,
}


class AppliedStepLR(LambdaLR):  # type: ignore[misc]  # torch is not typed for us
    """A LambdaLR that advances only if the optimizer has changed a parameter since the last call.

    A step that loss scaling skips has no gradients. Without this rule, the overflows of the first
    steps would use up a part of the warm-up.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self._is_applied = True  # LRScheduler takes its first value by a step
        super().__init__(optimizer, factor)
        self._is_applied = False
        optimizer.register_step_post_hook(self._note_step)

    def step(self, epoch: int | None = None) -> None:
        """Set the rate of the next step, unless nothing has been applied since the last call."""
        if self._is_applied:
            super().step(epoch)
            self._is_applied = False

    def _note_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self._is_applied = True


def large_batch_schedule(optimizer: Optimizer, rate: LargeBatchRate) -> AppliedStepLR:
    """Return a scheduler that gives each step its rate; call its `step` after the optimizer's.

    Args:
        optimizer: its `lr` is the rate that was tuned for `rate.reference_batch`; groups keep their
            ratios.
        rate: batch, epochs, scaling rule, warm-up and decay.
    """
    return AppliedStepLR(optimizer, rate.factor)
