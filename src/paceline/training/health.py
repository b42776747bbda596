"""Notices a training that goes wrong, and says where it began: rank, step and layer.

Two questions, two checks::

    each rank, before gradients are reduced     GradientCheck: which rank made the first NaN?
        afterwards every rank has it            the sum of a NaN and anything is NaN
    an applied step                             DivergenceAlarm: does the loss or a gradient grow?

The first reads each gradient once, and sends nothing as long as all are finite: its flag goes with
that of `precision.agree`. Only when all ranks have agreed that a gradient is not finite do they
exchange where it was.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError, UsageError
from paceline.training.local_tensors import local
from paceline.training.optimizers.norms import squared_norms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteGradient:
    """Where a gradient was not finite before it met those of other ranks.

    Attributes:
        rank: in the group that reduces the gradients.
        step: of the training.
        layer: name of the parameter whose gradient was the first of the backward pass.
        layers: how many parameters' gradients were not finite.
    """

    rank: int
    step: int
    layer: str
    layers: int

    def error(self) -> PacelineError:
        """Return the error that stops a training for it."""
        return PacelineError(
            f"the gradient of {self.layer} is not finite",
            where=f"rank {self.rank}; step {self.step}",
            why=f"{self.layers} gradients of rank {self.rank} are infinite or NaN; no parameter of "
            "any rank was changed by it",
            fix=f"Look at the samples of rank {self.rank} in step {self.step}, and at the layers "
            "behind this one: torch.autograd.set_detect_anomaly(True) names the operation",
        )


class GradientCheck:
    """Finds which rank and layer a gradient that is not finite comes from.

    For each step: `observe` each bucket before it is reduced, then read `flag`, and if the ranks
    agree that a gradient is not finite, all call `culprits`; `reset` before the next step.

    Nothing of it outlives a step, so that there is no state to save.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Check the gradients of parameters of these names, in the same order on all ranks."""
        self._names = list(names)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._observed: list[tuple[list[int], torch.Tensor]] = []

    def observe(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Note the gradients of a bucket; call it before they are reduced.

        Args:
            names: of the parameters, in the order of the backward pass, as a NaN spreads.
            gradients: as this rank computed them, scaled or not; any shape and device. A norm
                above 1e19 counts as infinite.

        Cost: reads each element once; no copy, no message, no wait for the device.
        """
        values = {
            self._numbers[name]: local(gradient)
            for name, gradient in zip(names, gradients, strict=True)
            if gradient.numel()
        }
        if values:
            # Sums of squares: on a CPU the largest element takes 15 times as long to find.
            self._observed.append((list(values), squared_norms(list(values.values()))))

    def flag(self) -> torch.Tensor:
        """Return whether a gradient was not finite on this rank: shape (), 0 or 1, float32."""
        bad = [~torch.isfinite(norms).all() for _, norms in self._observed]
        return torch.stack(bad).any().float() if bad else torch.zeros(())

    def norms(self, scale: float = 1.0) -> dict[str, float]:
        """Return the norm of each gradient of the step on this rank, by name.

        Args:
            scale: of the loss, by which they are divided.
        """
        return {
            self._names[number]: math.sqrt(square) / scale
            for numbers, squares in self._observed
            for number, square in zip(numbers, squares.tolist(), strict=True)
        }

    def culprits(
        self, step: int, group: dist.ProcessGroup | None = None
    ) -> tuple[NonFiniteGradient, ...]:
        """Return each rank that had a gradient which was not finite; all ranks must call it.

        Empty if the gradients became infinite by their sum, or in an fp16 reduction.

        Cost: one all-gather of two numbers.
        """
        bad = [
            number
            for numbers, norms in self._observed
            for number, is_finite in zip(numbers, torch.isfinite(norms).tolist(), strict=True)
            if not is_finite
        ]
        device = self._observed[0][1].device if self._observed else torch.device("cpu")
        own = torch.tensor([bad[0] if bad else -1, len(bad)], dtype=torch.int64, device=device)
        gathered = [own]
        if group is not None or dist.is_initialized():
            gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, own, group=group)
        found = []
        for rank, values in enumerate(gathered):
            number, count = values.tolist()
            if count:
                layer = self._names[number]
                found.append(NonFiniteGradient(rank=rank, step=step, layer=layer, layers=count))
        return tuple(found)

    def reset(self) -> None:
        """Forget the step's gradients."""
        self._observed.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The step and layer at which a training diverges.

    Attributes:
        step: at which the alarm is given.
        quantity: ``loss`` or ``gradient norm``.
        layer: whose gradient norm grew most against its own median; "" where no norms are known.
        value: of the quantity at this step.
        median: of the quantity over the steps before.
        steps: how many steps in a row were above the limit; 0 if the value is not finite.
    """

    step: int
    quantity: str
    layer: str
    value: float
    median: float
    steps: int

    def __str__(self) -> str:
        text = f"training diverges at step {self.step}: the {self.quantity} is {self.value:.4g}"
        if self.steps:
            ratio = self.value / self.median
            text += f", {ratio:.1f} times its median, and has been too large for {self.steps} steps"
        return text + (f"; most of it in {self.layer}" if self.layer else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceLimits:
    """When a training counts as diverging.

    Attributes:
        factor: a value above `factor` times its running median is too large.
        patience: steps in a row that must be too large; a single bad batch is no divergence.
        window: steps of the running median; more than twice `patience`, so that the steps that are
            too large do not raise it.
        warmup: steps before anything but a value that is not finite is an alarm.
    """

    factor: float = 5.0
    patience: int = 10
    window: int = 100
    warmup: int = 50

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: no training could ever diverge, or each one would.
        """
        if not (
            self.factor > 1
            and self.patience >= 1
            and self.window > 2 * self.patience
            and 0 <= self.warmup <= self.window
        ):
            raise UsageError(
                "factor must be above 1, window over twice patience, and warmup at most window",
                why=f"factor {self.factor}, patience {self.patience}, window {self.window}, "
                f"warmup {self.warmup}",
                fix="Leave the defaults, 5, 10, 100 and 50",
            )


class DivergenceAlarm:
    """Compares the loss and the gradients' norms with their running medians.

    A pure function of what was observed: the same on all ranks if they observe the same values.
    """

    def __init__(self, limits: DivergenceLimits | None = None) -> None:
        self.limits = limits or DivergenceLimits()
        self._history: dict[str, deque[float]] = {}  # "" is the loss, "*" the norm of all layers
        self._too_large: dict[str, int] = {_LOSS: 0, _ALL: 0}

    def observe(
        self,
        step: int,
        *,
        loss: float | None = None,
        gradient_norms: Mapping[str, float] | None = None,
    ) -> Divergence | None:
        """Return the divergence that this step completes, if it does.

        A value that is not finite is one at once. After an alarm, the count begins again.

        Args:
            step: of the training.
            loss: averaged over ranks; None if it is not known. One that is not positive has no
                factor to its median and is only checked for being finite.
            gradient_norms: by parameter, of the unscaled gradients of an applied step: steps that
                loss scaling skips are no divergence.
        """
        norms = dict(gradient_norms or {})
        values = dict(norms)
        if norms:
            values[_ALL] = math.sqrt(math.fsum(norm * norm for norm in norms.values()))
        if loss is not None:
            values[_LOSS] = loss
        divergence = self._judge(step, values, norms)
        for name, value in values.items():
            if math.isfinite(value):
                self._history.setdefault(name, deque(maxlen=self.limits.window)).append(value)
        return divergence

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the window and the counts."""
        history = {name: list(values) for name, values in self._history.items()}
        return {"history": history, "too_large": dict(self._too_large)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        window = self.limits.window
        self._history = {k: deque(v, maxlen=window) for k, v in state["history"].items()}
        self._too_large = dict(state["too_large"])

    def _judge(
        self, step: int, values: dict[str, float], norms: dict[str, float]
    ) -> Divergence | None:
        found = None
        for name, quantity in _QUANTITIES.items():
            if name not in values:
                continue
            value, median = values[name], self._median(name)
            if not math.isfinite(value):
                steps = 0
            else:
                is_too_large = 0 < median < math.inf and value > self.limits.factor * median
                steps = self._too_large[name] + 1 if is_too_large else 0
                self._too_large[name] = steps
                if steps < self.limits.patience:
                    continue
            self._too_large[name] = 0
            found = found or Divergence(
                step=step,
                quantity=quantity,
                layer=self._worst(norms),
                value=value,
                median=median,
                steps=steps,
            )
        return found

    def _median(self, name: str) -> float:
        """Return the running median; infinity, of which nothing is a multiple, in the warm-up."""
        values = self._history.get(name, ())
        return statistics.median(values) if len(values) >= max(1, self.limits.warmup) else math.inf

    def _worst(self, norms: dict[str, float]) -> str:
        """Return the layer that is not finite, or has grown most; the first of several."""
        for name, norm in norms.items():
            if not math.isfinite(norm):
                return name
        growth = {}
        for name, norm in norms.items():
            values = self._history.get(name)
            median = statistics.median(values) if values else 0.0
            growth[name] = norm / median if median > 0 else 0.0
        return max(growth, key=growth.__getitem__) if growth else ""


_LOSS, _ALL = "", "*"
_QUANTITIES = {_LOSS: "loss", _ALL: "gradient norm"}
