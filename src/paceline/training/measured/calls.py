"""Which operator calls of a step are equal work: a signature of names, shapes, strides, scalars.

Values of tensors are not part of it, except that an operator is timed with those of its first call:
an embedding's indices, or a mask, decide what it reads.
"""

from __future__ import annotations

from typing import Any

import torch

# These run once, and are never called again on their own.
_ONCE = ("c10d", "_c10d_functional", "prim", "profiler")
_BOOKKEEPING = frozenset(["detach", "lift_fresh"])


def is_repeatable(function: Any) -> bool:
    """Return whether an operator may be called again, outside of its step."""
    return function.namespace not in _ONCE


def is_bookkeeping(function: Any) -> bool:
    """Return whether a call is a mark of autograd's or the profiler's rather than work."""
    name = function._schema.name.split("::")[-1]  # noqa: SLF001  # operators have no public name
    return function.namespace in ("prim", "profiler") or name in _BOOKKEEPING


def signature_of(function: Any, args: Any, kwargs: Any) -> str:
    """Return the signature of a call.

    >>> x = torch.zeros(2, 3)
    >>> signature_of(torch.ops.aten.mul.Tensor, (x, x.t()), {})
    'aten.mul.Tensor(float32[2,3;3,1], float32[3,2;1,3])'
    """
    texts = [_text(value) for value in args]
    texts += [f"{name}={_text(value)}" for name, value in kwargs.items()]
    return f"{function}({', '.join(texts)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor_text(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, torch.Generator):
        return "generator"
    return str(value).removeprefix("torch.")


def _tensor_text(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    device = "" if tensor.device.type == "cpu" else f"{tensor.device.type}:"
    if tensor.layout is not torch.strided:
        return f"{device}{dtype}[{shape};{str(tensor.layout).removeprefix('torch.')}]"
    return f"{device}{dtype}[{shape};{','.join(map(str, tensor.stride()))}]"
