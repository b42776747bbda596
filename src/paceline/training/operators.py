"""Sorts torch's operators into the classes that a Machine has rates for, and counts their work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.machine import Operator

# By the first part of the operator's name that matches; whatever matches nothing moves data once
# and computes little, as elementwise operators do.
_CLASSES: tuple[tuple[str, Operator], ...] = (
    ("_scaled_dot_product", "attention"),
    ("_flash_attention", "attention"),
    ("_efficient_attention", "attention"),
    ("_thnn_fused_lstm", "matmul"),
    ("mkldnn_rnn", "matmul"),
    ("addmm", "matmul"),
    ("addmv", "matmul"),
    ("baddbmm", "matmul"),
    ("bmm", "matmul"),
    ("mm", "matmul"),
    ("mv", "matmul"),
    ("convolution", "convolution"),
    ("_convolution", "convolution"),
    ("native_batch_norm", "normalization"),
    ("_native_batch_norm", "normalization"),
    ("_batch_norm", "normalization"),
    ("native_layer_norm", "normalization"),
    ("native_group_norm", "normalization"),
    ("_fused_rms_norm", "normalization"),
    ("_softmax", "normalization"),
    ("_safe_softmax", "normalization"),
    ("_log_softmax", "normalization"),
    ("max_pool", "pooling"),
    ("avg_pool", "pooling"),
    ("adaptive_max_pool", "pooling"),
    ("adaptive_avg_pool", "pooling"),
    ("_adaptive_avg_pool", "pooling"),
    ("upsample", "pooling"),
    ("embedding", "embedding"),
)

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
    for prefix, operator in _CLASSES:
        if name.startswith(prefix):
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
        return [one for value in values for one in tensors_in(value)]
    return []


def count_bytes(args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that one call reads and writes; an expanded tensor counts once."""
    tensors = tensors_in(args) + tensors_in(kwargs) + tensors_in(result)
    return int(sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors))
