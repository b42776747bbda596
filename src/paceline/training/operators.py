"""Sorts torch's operators into the classes that a Machine has rates for, and counts their work.

Most calls are one piece of work. A recurrent layer is one call that runs products of several sizes,
many of them once per time step: it is counted as these products (`recurrent`). An operator that no
class describes is counted by the bytes that it moves, and named, so that a prediction can say what
it merely assumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from paceline.core.machine import Operator
from paceline.training import recurrent

if TYPE_CHECKING:
    from collections.abc import Callable

# By how the operator's name begins; what matches nothing moves data once and computes little, as
# elementwise operators do. A backward operator is of its forward one's class.
_CLASSES: dict[Operator, tuple[str, ...]] = {
    "attention": ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "matmul": (
        *("addmm", "_addmm", "addmv", "addbmm", "baddbmm", "bmm", "mm", "mv", "dot", "vdot"),
        "_scaled_mm",
    ),
    "recurrent": ("mkldnn_rnn",),
    "convolution": ("convolution", "_convolution"),
    "batch_norm": ("native_batch_norm", "_native_batch_norm", "_batch_norm"),
    "layer_norm": ("native_layer_norm", "_fused_rms_norm"),
    "group_norm": ("native_group_norm",),
    "softmax": ("_softmax", "_safe_softmax", "_log_softmax"),
    "pooling": (
        *("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"),
        "_adaptive_avg_pool",
    ),
    "upsampling": ("upsample", "_upsample"),
    "embedding_bag": ("_embedding_bag",),
    "embedding": ("embedding",),
    "foreach": ("_foreach",),
    "fused": ("_fused_adagrad", "_fused_adam", "_fused_sgd"),
    "transcendental": (
        *("gelu", "silu", "exp", "log", "tanh", "sigmoid", "erf", "pow", "sin", "cos"),
        "_thnn_fused",  # the gates of a recurrent cell, whose products came before
    ),
    "random": ("bernoulli", "native_dropout", "rand", "normal", "uniform", "multinomial"),
}
# Cheap although they begin like a costly one: they work on a result that is known already.
_CHEAP = ("tanh_backward", "sigmoid_backward", "logical")
_COUNTED_IN_FLOPS = (
    *("matmul", "convolution", "convolution_1d", "depthwise", "transposed", "attention"),
    "recurrent",
)

# Elementwise by what they do, in addition to those that torch itself calls pointwise or reductions:
# they read their arguments once and write their result.
_MOVES = (
    *("_index_put_impl", "_pad"),
    *("_linalg_check_errors", "_local_scalar_dense", "stack"),
    *("_to_copy", "_unsafe_index", "all", "amax", "amin", "any", "arange", "argmax", "argmin"),
    *("binary_cross_entropy", "cat", "channel_shuffle", "clone", "constant_pad", "copy"),
    *("count_nonzero", "cumsum", "diag", "eye", "fill", "flip", "full", "gather", "glu"),
    *("hardtanh", "huber_loss", "index", "kl_div", "linalg_vector_norm", "masked_", "max", "mean"),
    *("min", "mse_loss", "new_full", "new_ones", "new_zeros", "nll_loss", "norm", "one_hot"),
    *("ones", "pixel_shuffle", "pixel_unshuffle", "reflection_pad", "repeat", "replication_pad"),
    *("roll", "scalar_tensor", "scatter", "select_backward", "select_scatter", "slice_backward"),
    *("slice_scatter", "smooth_l1_loss", "soft_margin_loss", "std", "sum", "threshold", "tril"),
    *("triu", "unfold_backward", "var", "where", "zero"),
)

# Results that share their argument's storage, and bare allocations: dispatch is all they cost.
_VIEWS = frozenset(
    [
        "_coalesced_",
        "_indices",
        "_reshape_alias",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_unsafe_view",
        "_values",
        "alias",
        "as_strided",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "new_empty",
        "new_empty_strided",
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
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsqueeze",
        "view",
        "view_as_complex",
        "view_as_real",
    ]
)

# These read from their first argument only what they return.
_LOOKUPS = frozenset(["aten::embedding", "aten::index", "aten::index_select", "aten::gather"])
# These read one row of their first argument for each index in their second.
_BAGS = frozenset(["aten::_embedding_bag", "aten::_embedding_bag_forward_only"])

# Seen in a dispatch mode but no work of the step: autograd's own bookkeeping and profiler marks.
_IGNORED = frozenset(["detach", "lift_fresh"])


def _times_columns(factor: int) -> Callable[[Any], int]:
    """Return the FLOPs of a product whose factors are arguments `factor` and the one after it.

    A matrix (m, k) times (k, n) takes 2mkn, a batch of them 2bmkn.
    Source: Golub and Van Loan, Matrix Computations, 4th edition, section 1.1.
    """
    return lambda args: 2 * args[factor].numel() * args[factor + 1].shape[-1]


def _times_vector(factor: int) -> Callable[[Any], int]:
    """Return the FLOPs of a matrix, or vector, times a vector: 2mk; source as above."""
    return lambda args: 2 * args[factor].numel()


# Of operators for which torch.utils.flop_counter has no formula, by name without namespace.
_FORMULAS: dict[str, Callable[[Any], int]] = {
    "mv": _times_vector(0),
    "dot": _times_vector(0),
    "vdot": _times_vector(0),
    "addmv": _times_vector(1),
    "addmv_": _times_vector(1),
    "addmm_": _times_columns(1),
    "_addmm_activation": _times_columns(1),
    "addbmm": _times_columns(1),
    "addbmm_": _times_columns(1),
    "baddbmm_": _times_columns(1),
}


@dataclass(frozen=True, slots=True)
class Work:
    """Equal pieces of work that one operator call does.

    Attributes:
        operator: the class whose rate applies.
        count: of pieces.
        flops: of one piece.
        bytes: read and written by one piece.
        name: of the operator, if its cost is assumed; empty if its class describes it.
    """

    operator: Operator
    count: int
    flops: int
    bytes: int
    name: str = ""


def works_of(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[Work, ...]:
    """Return the work of one operator call; none for what is no work."""
    operator = classify(function)
    if operator is None:
        return ()
    if operator == "view":
        return (Work(operator, 1, 0, 0),)
    pieces = recurrent.pieces_of(_name(function), args)
    if pieces:
        return tuple(Work(*piece) for piece in pieces)
    flops = count_flops(function, args, kwargs, result)
    bytes_ = count_bytes(function, args, kwargs, result)
    if operator == "convolution":
        operator = _kind_of_convolution(_name(function), args)
    if operator in ("foreach", "fused"):
        # One call for all parameters; on a CPU the tensors of the list are worked on one by one.
        count = max(1, len(args[0]))
        return (Work(operator, count, 0, bytes_ // count),)
    described = _is_described(function, operator, flops)
    name = "" if described or not bytes_ else str(function.overloadpacket)
    return (Work(operator, 1, flops, bytes_, name),)


def _kind_of_convolution(name: str, args: Any) -> Operator:
    """Return the class of a convolution: kernels differ by what is summed, and over how many axes.

    Args:
        name: of the operator, without namespace.
        args: of the call: of a backward one, the gradient comes before input and weight, and the
            sizes of the bias are known.
    """
    is_backward = name.startswith("convolution_backward")
    x, weight = args[1:3] if is_backward else args[0:2]
    transposed, groups = (args[7], args[9]) if is_backward else (args[6], args[8])
    if transposed:
        return "transposed"
    if groups > 1 and weight.shape[1] == 1:
        return "depthwise"
    return "convolution_1d" if x.dim() == 3 else "convolution"  # batch, channels, length


def classify(function: Any) -> Operator | None:
    """Return the class of an operator; None for what is no work."""
    if function.namespace in ("prim", "profiler"):
        return None
    name = _name(function)
    if name in _IGNORED:
        return None
    if name in _VIEWS or name.removesuffix("_") in _VIEWS:  # also in place
        return "view"
    if not name.startswith(_CHEAP):
        for operator, prefixes in _CLASSES.items():
            if name.startswith(prefixes):
                return operator
    return "elementwise"


def _name(function: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    name: str = function._schema.name.split("::")[-1]  # noqa: SLF001  # operators have no public name
    return name


def _is_described(function: Any, operator: Operator, flops: int) -> bool:
    """Return whether an operator's cost follows from its class rather than from an assumption."""
    if operator in _COUNTED_IN_FLOPS:
        return flops > 0
    if operator != "elementwise":
        return True
    if function.namespace != "aten":
        return False
    tags = {tag.name for tag in function.tags}
    name = _name(function).removeprefix("_")
    return bool(tags & {"pointwise", "reduction"}) or name.startswith(
        tuple(move.removeprefix("_") for move in _MOVES)
    )


def count_flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of one call; 0 for operators that are bound by memory.

    Source: torch.utils.flop_counter, `_FORMULAS`, and for the CPU's fused attention two matrix
    products forward and five backward, as for the other fused kernels.
    """
    packet = function.overloadpacket
    name = str(packet)
    if "flash_attention_for_cpu" in name:
        return _attention_flops(args, backward="backward" in name)
    own = _FORMULAS.get(_name(function))
    if own is not None:
        return int(own(args))
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
    """Return the bytes that one call reads and writes; an expanded tensor counts once.

    With a sparse argument, as the gradient of an embedding table can be, its rows are read, and
    read and written in the dense one.
    """
    arguments = tensors_in(args) + tensors_in(kwargs)
    if function._schema.name in _BAGS:  # noqa: SLF001
        table, indices = arguments[:2]
        row_bytes = table.shape[-1] * table.element_size()
        rest = arguments[1:] + tensors_in(result)
        return int(indices.numel() * row_bytes) + bytes_of(rest)
    sparse = [tensor for tensor in arguments if tensor.layout is torch.sparse_coo]
    if sparse:
        return 3 * bytes_of(sparse)
    if function._schema.name in _LOOKUPS:  # noqa: SLF001
        return bytes_of(tensors_in(result)) * 2 + bytes_of(arguments[1:])
    return bytes_of(arguments) + bytes_of(tensors_in(result))


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Return the bytes that tensors hold; of a sparse one its indices and values."""
    return int(sum(map(_nbytes, tensors)))


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)  # noqa: SLF001  # uncoalesced
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))
