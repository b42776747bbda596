"""Leaves the gradients of weights out of a backward pass, to compute them when a rank would wait.

    y = x w            backward       other stages wait for it     may be any time later
                       d/dx = g w^T   backward_input
                       d/dw = x^T g                                backward_weight

Linear layers and convolutions are deferred, where the weights are parameters: they take most of the
time, and both gradients of such a layer are products of equal size. All other parameters get their
gradients in the first part.
Source: Qi et al., Zero bubble pipeline parallelism, ICLR 2024, section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class DeferredGradients(TorchFunctionMode):  # type: ignore[misc]  # torch has no types here
    """While it is entered, the layers that are called leave out their weights' gradients.

    The graph and what it saves live until `compute` has run. Under autocast nothing is left out,
    since weights have another data type there.

    Attributes:
        is_used: whether it was entered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_used = False
        self._pending: list[Callable[[], None]] = []

    def __enter__(self) -> Any:
        self.is_used = True
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; a linear layer or a convolution in its deferred form."""
        del types
        given = dict(kwargs or {})
        if func is torch.nn.functional.linear and _is_deferrable(args, given, 3):
            return _Linear.apply(self._pending, *_bound(args, given, ("input", "weight", "bias")))
        dims = _CONVOLUTIONS.get(func)
        if dims is not None and _is_deferrable(args, given, 7):
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            x, weight, bias, stride, padding, dilation, groups = _bound(args, given, names)
            if not isinstance(padding, str) and x.dim() == dims + 2:
                sizes = [_sizes(value, dims) for value in (stride, padding, dilation)]
                return _Convolution.apply(self._pending, x, weight, bias, *sizes, groups)
        return func(*args, **given)

    def compute(self) -> None:
        """Compute the gradients that were left out."""
        with torch.no_grad():
            while self._pending:
                self._pending.pop(0)()

    def clear(self) -> None:
        """Forget the gradients that were left out.

        The graph refers to the list, and the functions in it to what the graph saved: garbage
        collection does not see such a cycle, so the list itself must be emptied.
        """
        self._pending.clear()


_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _bound(args: Any, kwargs: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name, _DEFAULTS.get(name)) for name in names]


def _is_deferrable(args: Any, kwargs: dict[str, Any], most: int) -> bool:
    """Return whether the weights of a call are parameters that are trained."""
    x, weight, bias = _bound(args, kwargs, ("input", "weight", "bias"))
    return (
        len(args) <= most
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(weight.device.type)
        and isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and (bias is None or (isinstance(bias, nn.Parameter) and bias.requires_grad))
        and x.dtype == weight.dtype
        and x.requires_grad  # otherwise nobody waits for the first part
    )


def _sizes(value: Any, dims: int) -> list[int]:
    values = list(value) if isinstance(value, tuple | list) else [value]
    return values * dims if len(values) == 1 else values


def _add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def forward(ctx: Any, pending: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.pending, ctx.bias = pending, bias
        ctx.weight = weight  # itself: its gradient is written to
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        parameter, bias = ctx.weight, ctx.bias
        saved = x.detach()  # without the graph, which refers to `pending`

        def add() -> None:
            rows = gradient.reshape(-1, gradient.shape[-1])
            inputs = saved.reshape(-1, saved.shape[-1])
            if parameter.grad is None:
                parameter.grad = rows.t().mm(inputs)
            else:  # one pass over the gradient: it is larger than the rows of a microbatch
                parameter.grad.addmm_(rows.t(), inputs)
            if bias is not None:
                _add(bias, rows.sum(0))

        ctx.pending.append(add)
        return None, gradient.matmul(weight), None, None


class _Convolution(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    @staticmethod
    def forward(ctx: Any, pending: Any, x: Any, weight: Any, bias: Any, *sizes: Any) -> Any:
        stride, padding, dilation, groups = sizes
        ctx.pending, ctx.weight, ctx.bias = pending, weight, bias
        ctx.sizes = (stride, padding, dilation, False, [0] * len(stride), groups)
        ctx.save_for_backward(x, weight)
        return torch.ops.aten.convolution(x, weight, bias, *ctx.sizes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)  # see _Linear
        parameter, bias, sizes = ctx.weight, ctx.bias, ctx.sizes
        bias_sizes = None if bias is None else list(bias.shape)

        def part(*mask: bool) -> Any:
            return torch.ops.aten.convolution_backward(
                gradient, x, weight, bias_sizes, *sizes, list(mask)
            )

        def add() -> None:
            _, of_weight, of_bias = part(False, True, bias is not None)
            _add(parameter, of_weight)
            if bias is not None:
                _add(bias, of_bias)

        ctx.pending.append(add)
        return None, part(True, False, False)[0], None, None, None, None, None, None
