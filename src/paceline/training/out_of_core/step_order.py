"""The order of a step's events: one set of rules for a session and for a capture.

A session (`session`) runs steps; a capture (`capturing`) runs them on tensors without data, and
predicts what the session will do. Both ask here which tensors may be away, which number a saved
tensor has, and in which order the optimizer updates parameters, so that they cannot differ.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from paceline.training.out_of_core.managed import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

LEAST_BYTES = 1 << 16  # smaller tensors stay: a transfer would cost more than they free
VIEW_PART = 8  # a view of less than this part of its storage belongs to a larger thing, a data set

# Their update of a parameter reads no other parameter's state.
SUPPORTED = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
)

CPU = torch.device("cpu")

SavedT = TypeVar("SavedT")


@dataclass(frozen=True)
class Movable:
    """Which tensors may be away.

    Attributes:
        types: of them; a subclass may have its data anywhere.
        device: that they are on.
    """

    types: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
    device: torch.device = CPU

    def is_plain(self, value: Any) -> bool:
        """Whether a value is a tensor that is what its memory says."""
        if type(value) not in self.types:
            return False
        is_here = value.layout is torch.strided and value.device == self.device
        # Bits of the tensor, not of its memory.
        return bool(is_here and not (value.is_conj() or value.is_neg()))

    def is_saved(self, tensor: torch.Tensor) -> bool:
        """Whether to move a tensor that autograd saves."""
        if not self.is_plain(tensor) or _is_parameter(tensor):
            return False
        size = tensor.untyped_storage().nbytes()
        return bool(size >= LEAST_BYTES and tensor.nbytes * VIEW_PART >= size)

    def is_large(self, value: Any) -> bool:
        """Whether to move a parameter's state, or a tensor of it."""
        return self.is_plain(value) and bool(value.nbytes >= LEAST_BYTES) and _is_dense(value)

    def large_of(self, state: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a parameter's state that are moved."""
        return {key: value for key, value in state.items() if self.is_large(value)}


class SavedOrder(Generic[SavedT]):
    """The saved tensors of a step that may be away, numbered as autograd saves them.

    A storage is saved once, however many tensors of it are, unless it was changed in between.
    """

    def __init__(self, movable: Movable) -> None:
        self._movable = movable
        self._count = 0
        self._by_storage: dict[tuple[int, int | None], weakref.ref[Any]] = {}
        self._used: set[int] = set()

    def begin_step(self) -> None:
        """Number from 0 again."""
        self._count = 0
        self._by_storage.clear()
        self._used.clear()

    def take(
        self, tensor: torch.Tensor, make: Callable[[int], SavedT]
    ) -> tuple[SavedT | None, bool]:
        """Return what stands for a saved tensor, and whether it is new; None if the tensor stays.

        Args:
            tensor: that autograd saves.
            make: returns what stands for the tensor of this number.
        """
        if not self._movable.is_saved(tensor):
            return None, False
        key = identity(tensor), version_of(tensor)
        known = self._by_storage.get(key)
        saved: SavedT | None = known() if known is not None else None
        if saved is not None:
            return saved, False
        saved = make(self._count)
        self._count += 1
        self._by_storage[key] = weakref.ref(saved)
        return saved, True

    def is_first_use(self, index: int) -> bool:
        """Whether the backward pass needs the tensor of this number for the first time."""
        if index in self._used:
            return False
        self._used.add(index)
        return True


def update_one_by_one(
    groups: list[dict[str, Any]],
    is_large: Callable[[Any], bool],
    update: Callable[[int, Any], None],
) -> None:
    """Update each large parameter that has a gradient while it is alone in the groups.

    Args:
        groups: of the optimizer; afterwards they have the other parameters only.
        is_large: whether a parameter is updated alone.
        update: is called with the parameter's index among all, and the parameter.
    """
    members = [group["params"] for group in groups]
    others: list[list[Any]] = [[] for _ in groups]
    index = 0
    for group in groups:
        group["params"] = []
    for number, parameters in enumerate(members):
        for parameter in parameters:
            if parameter.grad is None or not is_large(parameter):
                others[number].append(parameter)
            else:
                groups[number]["params"] = [parameter]
                update(index, parameter)
                groups[number]["params"] = []
            index += 1
    for group, parameters in zip(groups, others, strict=True):
        group["params"] = parameters


def raw_step(optimizer: Optimizer) -> Callable[[Any], Any] | None:
    """Return `step` without what calls the hooks; None where parameters depend on each other."""
    if type(optimizer) not in SUPPORTED:
        return None
    return getattr(type(optimizer).step, "__wrapped__", None)


def identity(tensor: torch.Tensor) -> int:
    """Return what a tensor's storage is known by while it is alive."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # no public name


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, which stays in memory in any case."""
    return any(isinstance(found, torch.nn.Parameter) for found in (tensor, tensor._base))  # noqa: SLF001  # no public name


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their part of the memory."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    return bool(extent == tensor.numel())
