"""The operators that communicate: the field's word for each, and where its bytes are.

``c10d::*`` is what DDP's reducer, torch.distributed calls, FSDP2, pipelining and checkpoints
dispatch; ``_c10d_functional::*`` is what DTensor and compiled code do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.trace.collectors import torch_internals as internals
from paceline.trace.format.events import RECV, SEND, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

# Operator -> the field's word for it, and which argument holds the bytes that this rank gives.
C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "gather_into_tensor_": ("gather", 1),  # since 2.14
    "scatter_": ("scatter", 0),
    "send": (SEND, 0),
    "recv_": (RECV, 0),
    "recv_any_source_": (RECV, 0),
}
FUNCTIONAL = {
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "isend": (SEND, 0),
    "irecv": (RECV, 0),
}
# Operators of these namespaces that move nothing, or dispatch others of them.
NOT_COMMUNICATION = frozenset(
    {"check_for_nan", "wait_tensor", "_wrap_tensor_autograd", "batch_p2p_ops"}
)
_PEERS = ("root_rank", "dst", "src")
_KINDS = {SEND: Kind.SEND, RECV: Kind.RECV}


@dataclass(frozen=True, slots=True)
class Places:
    """Where an operator takes what the trace needs; None for an argument that it does not have."""

    payload: int | None
    group: int
    peer: int | None
    tag: int | None


def places(overload: Any, payload: int | None) -> Places:
    """Return where an operator takes its group, its root or other side, and its tag.

    Raises:
        ValueError: it takes no group.
    """
    names = internals.argument_names(overload)
    group = names.index("process_group" if "process_group" in names else "group_name")
    peer = next((names.index(name) for name in _PEERS if name in names), None)
    return Places(payload, group, peer, names.index("tag") if "tag" in names else None)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def kind_of(word: str) -> Kind:
    """Return the kind of event of an operation, by the field's word for it."""
    return _KINDS.get(word, Kind.COLLECTIVE)


class Payload(NamedTuple):
    """What a call is given to communicate.

    Attributes:
        size_bytes: of all tensors.
        device_type: of the device that the first tensor is on; cpu if there is none.
        is_traced: whether they stand for other tensors while a graph is made.
        dtype: of the first tensor; None if there is none.
    """

    size_bytes: int
    device_type: str
    is_traced: bool
    dtype: torch.dtype | None = None


def payload_of(value: Any) -> Payload:
    """Return what is in an operator's argument: a tensor, or nested lists of them."""
    # One function and no generator for what DDP calls amid a step, where the caches hold the data
    # of the model: each further function of Python costs a microsecond or more there.
    size_bytes, device_type, is_traced, dtype = 0, "", False, None
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if type(item) is torch.Tensor:
            size_bytes += item.numel() * item.element_size()
            if not device_type:
                device_type = "cpu" if item.is_cpu else item.device.type
                dtype = item.dtype
            continue
        for tensor in tensors(item):
            size_bytes += tensor.numel() * tensor.element_size()
            device_type = device_type or tensor.device.type
            dtype = dtype or tensor.dtype
            is_traced = is_traced or isinstance(tensor, internals.traced_types())
    return Payload(size_bytes, device_type or "cpu", is_traced, dtype)
