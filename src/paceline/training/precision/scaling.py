"""Loss scaling: gradients that fp16 would round to zero are multiplied before, and divided after.

The scale doubles after 2,000 steps without overflow, and is halved when a gradient is not finite;
that step is skipped. The first steps therefore find a scale near the largest that fp16 can hold,
and the scale follows the gradients from there.

The model's outputs, not the loss, carry the scale: an identity whose gradient is multiplied. By the
chain rule all gradients of the model are scaled as if the loss was, and `loss.backward()` stays the
user's own line. An fp16 output becomes fp32: its gradient would otherwise be rounded to fp16 before
it is scaled, which is too late.

    model -> fp16 outputs -> [fp32, gradient x scale] -> loss function -> loss
                          <- fp16   <- x scale  <- fp32 gradient       <-

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; the constants are
those of torch.amp.GradScaler.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_map

from paceline.core.errors import UsageError
from paceline.training.local_tensors import as_real, local
from paceline.training.precision.agreement import agree

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist
    from torch.optim import Optimizer

_LARGEST = torch.finfo(torch.float32).max
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.Size)


class LossScaler:
    """The scale of the gradients, the check for overflow, and the scale's course.

    Attributes:
        scale: factor of the gradients now; 1 if not enabled.
        skipped_in_a_row: steps skipped since the last that was applied.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        initial_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        """Make a scaler.

        Args:
            enabled: False for bf16 and fp32, which need no scale: gradients are only checked.
            initial_scale: scale of the first step.
            growth_factor: of the scale, after `growth_interval` applied steps in a row.
            backoff_factor: of the scale, after a skipped step.
            growth_interval: steps; equal factors of 2 and 0.5 keep every scale a power of two, by
                which multiplication and division are exact.

        Raises:
            UsageError: the scale could not grow, shrink or start.
        """
        if not (growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval > 0):
            raise UsageError(
                "a scale must grow by more than 1 and shrink by less than 1",
                why=f"growth_factor {growth_factor}, backoff_factor {backoff_factor}, "
                f"growth_interval {growth_interval}",
                fix="Leave the defaults, 2, 0.5 and 2000",
            )
        if not 0 < initial_scale <= _LARGEST:
            raise UsageError(
                f"initial_scale must be more than 0 and finite, got {initial_scale}",
                fix="Leave the default, 65536",
            )
        self.enabled = enabled
        self.scale = float(initial_scale) if enabled else 1.0
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.skipped_in_a_row = 0
        self._applied_in_a_row = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the last step overflowed although nothing was scaled up.

        The gradients themselves are then not finite: no smaller scale will help.
        """
        return self.skipped_in_a_row > 0 and self.scale * self._undo_backoff <= 1.0

    @property
    def _undo_backoff(self) -> float:
        return 1 / self.backoff_factor if self.enabled else 1.0

    def scale_outputs(self, outputs: Any) -> Any:
        """Return a model's outputs with the same values, whose gradients will be scaled.

        Args:
            outputs: a tensor, or nested lists, tuples, dicts and dataclasses of tensors and plain
                values. Floating-point tensors are scaled; those of fp16 become fp32.

        Raises:
            UsageError: an output is of another type: tensors inside of it would not be scaled.
        """
        return scale_gradients(outputs, self) if self.enabled else outputs

    def unscale_and_check(
        self,
        parameters: Iterable[torch.Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        found: torch.Tensor | None = None,
    ) -> bool:
        """Divide the gradients by the scale; return whether any rank's are not finite.

        Call it after the gradients are reduced over ranks, and before anything looks at them: once
        in a step. If it returns True, set all gradients to None on all ranks; call `update` anyway.

        Args:
            parameters: whose gradients are divided in place; DTensors and parts of parameters too.
            group: all ranks that hold gradients of the model; see `agree`.
            found: shape (), another reason of this rank not to step, for example of
                `health.GradientCheck.flag`; agreed on in the same all-reduce.

        Raises:
            UsageError: a gradient is fp16, which has no room for unscaled values.
        """
        parameters = list(parameters)
        gradients = [_values_of(p) for p in parameters if p.grad is not None]
        device = parameters[0].device if parameters else torch.device("cpu")
        flag = torch.zeros((), dtype=torch.float32, device=device)
        if found is not None:
            flag += found.to(device=device, dtype=torch.float32)
        for kind in dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients):
            chosen = [g for g in gradients if (g.device, g.dtype) == kind]
            own = torch.zeros((), dtype=torch.float32, device=kind[0])
            inverse = torch.full((), 1 / self.scale, dtype=torch.float32, device=kind[0])
            # torch._amp_* is what torch.amp.GradScaler runs: one pass that divides and checks.
            torch._amp_foreach_non_finite_check_and_unscale_(chosen, own, inverse)
            flag += own.to(device)
        return agree(flag, group)

    def update(self, found_inf: bool) -> None:
        """Choose the next step's scale, as torch.amp.GradScaler does."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if found_inf else 0
        if not self.enabled:
            return
        if found_inf:
            self.scale *= self.backoff_factor
            self._applied_in_a_row = 0
            return
        self._applied_in_a_row += 1
        if self._applied_in_a_row == self.growth_interval:
            self._applied_in_a_row = 0
            if self.scale * self.growth_factor <= _LARGEST:
                self.scale *= self.growth_factor

    def attach(self, optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> None:
        """Unscale, check, skip and update before each step of an optimizer.

        For a loop without `paceline.training.prepare`, which does the same among other things.
        Clip gradients in a pre-hook that is registered afterwards.
        """

        def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            found_inf = self.unscale_and_check(parameters, group)
            if found_inf:
                for parameter in parameters:
                    parameter.grad = None
            self.update(found_inf)

        optimizer.register_step_pre_hook(before_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters."""
        return {
            "scale": self.scale,
            "applied_in_a_row": self._applied_in_a_row,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.scale = float(state["scale"])
        self._applied_in_a_row = int(state["applied_in_a_row"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])


class Scale(Protocol):
    """A factor that may change from step to step."""

    scale: float


def scale_gradients(outputs: Any, by: Scale) -> Any:
    """Return a model's outputs with the same values, whose gradients `by` multiplies.

    Args:
        outputs: as for `LossScaler.scale_outputs`.
        by: whose scale is read in the backward pass.

    Raises:
        UsageError: an output is of another type: tensors inside of it would not be scaled.
    """
    return tree_map(functools.partial(_scale_leaf, by=by), outputs)


def _scale_leaf(value: Any, by: Scale) -> Any:
    if isinstance(value, torch.Tensor):
        return _ScaledGradient.apply(value, by) if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: scale_gradients(getattr(value, field.name), by)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, _PLAIN + _PLAIN_TORCH):
        return value
    raise UsageError(
        f"the model returns a {type(value).__name__}, whose tensors cannot be found",
        why="the gradients of its tensors would not be scaled",
        fix="Return tensors in lists, tuples, dicts or dataclasses, or register the type with "
        "torch.utils._pytree.register_pytree_node",
    )


class _ScaledGradient(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed for us
    """Identity, in fp32 for an fp16 tensor; its gradient is multiplied by the scale."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, by: Scale) -> torch.Tensor:
        ctx.by, ctx.dtype = by, tensor.dtype
        return tensor.float() if tensor.dtype == torch.float16 else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The scale of this moment, which is the one that the coming step divides by.
        return (gradient * ctx.by.scale).to(ctx.dtype), None


def _values_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a gradient: the stored values of a sparse one."""
    gradient = local(parameter.grad)
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.coalesce()
        gradient = gradient._values()  # noqa: SLF001  # the only way to them in place
    if gradient.dtype == torch.float16:
        raise UsageError(
            "a gradient is fp16, which cannot hold unscaled values",
            why="the model's weights are fp16",
            fix="Keep fp32 weights and use torch.autocast, or give the optimizer MasterWeights",
        )
    return as_real(gradient)
