"""States of whole parameters, of which each rank has parts: what is saved and loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.training.engine.exchange import SAVING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from paceline.training.engine.exchange import RowExchange
    from paceline.training.optimizer_state import State
    from paceline.training.tensor_parallel.parts import DividedPart


class PartStates:
    """Puts together what ranks have parts of, and takes a rank's own part out again.

    Args:
        exchange: between the ranks of a layer.
        names: of the divided layers.

    Attributes:
        dims: part and divided dim of each parameter, by its name in the model.
    """

    def __init__(self, exchange: RowExchange, names: Sequence[str]) -> None:
        self._exchange, self._names = exchange, names
        self.dims: dict[str, tuple[DividedPart, int]] = {}

    def _whole(self, own: torch.Tensor, part: DividedPart, dim: int) -> torch.Tensor:
        """Return a whole tensor of what all ranks have parts of; all ranks call this."""
        matrix = own.detach().reshape(len(own), -1)
        matrix = (matrix.t() if dim else matrix).contiguous()
        self._exchange.meet(len(matrix), (part.number, SAVING), self._names, own.device)
        whole = self._exchange.gathered(matrix, part.widths)
        shape = list(own.shape)
        shape[dim] = part.bounds[-1]
        return (whole.t().contiguous() if dim else whole).view(shape)

    def save(
        self, part: DividedPart, layer: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        """Put whole tensors into the state dict of a layer; all ranks call this."""
        for key, dim in part.dims().items():
            state[prefix + key] = self._whole(getattr(layer, key), part, dim)

    def load(
        self, part: DividedPart, _layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        """Put this rank's parts into a state dict that a layer is about to load."""
        for key, dim in part.dims().items():
            value = state.get(prefix + key)
            if value is not None and value.shape[dim] == part.bounds[-1]:
                state[prefix + key] = part.own(value, dim, self._exchange.rank)

    def whole_state(self, state: State) -> State:
        """Return the optimizer's state of whole parameters, by name; all ranks call this."""
        found = {name: dict(values) for name, values in state.items()}
        for name, (part, dim) in self.dims.items():
            shape = getattr(part.layer, name.rpartition(".")[2]).shape
            for key, value in state.get(name, {}).items():
                if key != "step" and isinstance(value, torch.Tensor) and value.shape == shape:
                    found[name][key] = self._whole(value, part, dim)
        return found

    def own_state(self, state: State) -> State:
        """Return what this rank's optimizer needs of the state of whole parameters."""
        found = dict(state)
        for name, (part, dim) in self.dims.items():
            shape = list(getattr(part.layer, name.rpartition(".")[2]).shape)
            shape[dim] = part.bounds[-1]
            found[name] = {
                key: part.own(value, dim, self._exchange.rank)
                if key != "step" and isinstance(value, torch.Tensor) and list(value.shape) == shape
                else value
                for key, value in state.get(name, {}).items()
            }
        return {name: values for name, values in found.items() if name in state}
