"""Gives every tensor that autograd saves to a session, and takes it back for the backward pass."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.core.errors import UsageError
from paceline.training.out_of_core.managed import CHANGED_IN_PLACE, version_of

if TYPE_CHECKING:
    from paceline.training.out_of_core.managed import Managed
    from paceline.training.out_of_core.session import Session


_thread = threading.local()  # torch's hooks hold for a thread: `installed` says whose they are


class View(NamedTuple):
    """A saved tensor without its memory; alive as long as autograd needs it."""

    managed: Managed
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def check_no_budget() -> None:
    """Raise an error where a session has its hooks in this thread.

    Raises:
        UsageError: it has.
    """
    if getattr(_thread, "installed", None) is not None:
        raise UsageError(
            "this thread has a memory budget already",
            where="SavedTensors",
            fix="Leave out memory_budget where the script runs under paceline run "
            "--memory-budget, or close the first one",
        )


class Kept(NamedTuple):
    """A saved tensor that stays in memory.

    It has no graph: autograd would hold itself by it, and the memory of a graph that no backward
    pass goes through would never be free. Its version is compared, which torch does not do for
    what hooks return.
    """

    tensor: torch.Tensor
    version: int | None


class SavedTensors:
    """The hooks of a session; they hold for the thread that installs them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def install(self) -> None:
        """Have autograd call the hooks from now on.

        Raises:
            UsageError: another session has its hooks in this thread.
        """
        check_no_budget()
        self._hooks.__enter__()
        _thread.installed = self

    def remove(self) -> None:
        """Have autograd save tensors itself again; what was saved before can still be used."""
        if getattr(_thread, "installed", None) is self:
            self._hooks.__exit__(None, None, None)
            _thread.installed = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd saves in place of a tensor."""
        managed = self._session.save(tensor)
        if managed is None:
            return Kept(tensor.detach(), version_of(tensor))
        return View(managed, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that `pack` got."""
        if isinstance(saved, Kept):
            if version_of(saved.tensor) != saved.version:
                raise RuntimeError(CHANGED_IN_PLACE)
            return saved.tensor
        storage, shift = self._session.need(saved.managed)
        empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
        offset = saved.offset + shift // empty.element_size()
        return empty.set_(storage, offset, saved.size, saved.stride)
