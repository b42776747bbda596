"""Gives every tensor that autograd saves to a session, and takes it back for the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from paceline.training.out_of_core.managed import Managed
    from paceline.training.out_of_core.session import Session


class View(NamedTuple):
    """A saved tensor without its memory; alive as long as autograd needs it."""

    managed: Managed
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """The hooks of a session; they hold for the thread that installs them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def install(self) -> None:
        """Have autograd call the hooks from now on."""
        self._hooks.__enter__()

    def remove(self) -> None:
        """Have autograd save tensors itself again; what was saved before can still be used."""
        self._hooks.__exit__(None, None, None)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd saves in place of a tensor."""
        managed = self._session.save(tensor)
        if managed is None:
            return tensor
        return View(managed, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that `pack` got."""
        if not isinstance(saved, View):
            tensor: torch.Tensor = saved
            return tensor
        storage, shift = self._session.need(saved.managed)
        empty = torch.empty(0, dtype=saved.dtype)
        offset = saved.offset + shift // empty.element_size()
        return empty.set_(storage, offset, saved.size, saved.stride)
