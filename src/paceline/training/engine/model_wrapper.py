"""What the data-parallel engines have in common: to the outside they are the model they train."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class ModelWrapper:
    """A module around a model, whose state dict, copies and pickles are those of the model.

    Attributes:
        module: the model.
    """

    module: nn.Module

    def await_parameters(self) -> None:
        """Wait until all parameters are those that the ranks updated."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state, with the parameters that all ranks updated."""
        self.await_parameters()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state; every rank loads the same."""
        self.await_parameters()
        return self.module.load_state_dict(state, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the model alone: one that no ranks train, as for an average of it."""
        self.await_parameters()
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model alone; each parameter with its own memory, not with its bucket's."""
        return _unwrapped, (copy.deepcopy(self),)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model
