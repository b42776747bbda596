"""Sorts torch's operators into the classes that a Machine has rates for, and counts their work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.machine import Operator

# By how the operator's name begins; what matches nothing moves data once and computes little, as
# elementwise operators do. A backward operator is of its forward one's class.
_CLASSES: dict[Operator, tuple[str, ...]] = {
    "attention": ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "matmul": ("addmm", "addmv", "baddbmm", "bmm", "mm", "mv", "mkldnn_rnn", "_thnn_fused"),
    "convolution": ("convolution", "_convolution"),
    "batch_norm": ("native_batch_norm", "_native_batch_norm", "_batch_norm"),
    "layer_norm": ("native_layer_norm", "native_group_norm", "_fused_rms_norm"),
    "softmax": ("_softmax", "_safe_softmax", "_log_softmax"),
    "pooling": (
        *("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"),
        *("_adaptive_avg_pool", "upsample"),
    ),
    "embedding": ("embedding",),
    "transcendental": ("gelu", "silu", "exp", "log", "tanh", "sigmoid", "erf", "pow", "sin", "cos"),
    "random": ("bernoulli", "native_dropout", "rand", "normal", "uniform", "multinomial"),
}
# Cheap although they begin like a costly one: they work on a result that is known already.
_CHEAP = ("tanh_backward", "sigmoid_backward", "logical")

# Results that share their argument's storage, and bare allocations: dispatch is all they cost.
_VIEWS = frozenset(
    [
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "new_empty",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
    ]
)

# These read from their first argument only what they return.
_LOOKUPS = frozenset(["aten::embedding", "aten::index", "aten::index_select", "aten::gather"])

# Seen in a dispatch mode but no work of the step: autograd's own bookkeeping and profiler marks.
_IGNORED = frozenset(["detach", "lift_fresh"])


def classify(function: Any) -> Operator | None:
    """Return the class of an operator; None for what is no work."""
    if function.namespace in ("prim", "profiler"):
        return None
    name = function._schema.name.split("::")[-1]  # noqa: SLF001  # operators have no public name
    if name in _IGNORED:
        return None
    if name in _VIEWS:
        return "view"
    if not name.startswith(_CHEAP):
        for operator, prefixes in _CLASSES.items():
            if name.startswith(prefixes):
                return operator
    return "elementwise"


def count_flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one call; 0 for operators that are bound by memory.

    Source: torch.utils.flop_counter for all but the CPU's fused attention, which is two matrix
    products forward and five backward, as for the other fused kernels.
    """
    packet = function.overloadpacket
    name = str(packet)
    if "flash_attention_for_cpu" in name:
        return _attention_flops(args, backward="backward" in name)
    formula: Callable[..., Any] | None = flop_registry.get(packet)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=result))


def _attention_flops(args: Any, *, backward: bool) -> int:
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, query_count, width = query.shape
    product = int(2 * batch * heads * query_count * key.shape[2] * width)
    return product * (5 if backward else 2)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


def count_bytes(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that one call reads and writes; an expanded tensor counts once."""
    arguments = tensors_in(args) + tensors_in(kwargs)
    if function._schema.name in _LOOKUPS:  # noqa: SLF001
        return _nbytes(tensors_in(result)) * 2 + _nbytes(arguments[1:])
    return _nbytes(arguments) + _nbytes(tensors_in(result))


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return int(sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors))
