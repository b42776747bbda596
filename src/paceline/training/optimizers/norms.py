"""Norms of whole layers, where a rank may hold only a part of each layer.

LARS and LAMB compare the norm of a layer's weights with that of its update. Where ranks share a
layer, each rank adds the squares of its own elements, and one all-reduce adds these sums for all
layers together: a message for each layer would cost more than the update.

    rank 0   |w0|^2 of its slices   |w1|^2 ...   \
    rank 1   |w0|^2 of its slices   |w1|^2 ...    >  one all-reduce of (layers,) float64
    rank 2   |w0|^2 of its slices   |w1|^2 ...   /

A rank's own norms are accumulated in float32, four times as fast as in float64 on a CPU, and right
for elements from 1e-18 on; sums over ranks are float64, so that they depend little on the number of
ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from paceline.core.errors import UsageError
from paceline.training.local_tensors import as_real, local

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh


class LayerNorms(Protocol):
    """Computes the norms of layers, whatever the part that this rank holds."""

    def squared(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared L2 norm of each whole layer.

        Args:
            tensors: what this rank holds of each layer: all ranks pass the same layers in the same
                order. A rank without a part of a layer passes an empty tensor.
            parameters: whose weights, gradients or updates they are.

        Returns:
            Shape (len(tensors),), float64, equal on all ranks.
        """
        ...

    def total(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared L2 norm of all layers of the model together: shape (), float64.

        Args:
            tensors: what this rank holds, as for `squared`.
            parameters: whose gradients they are.
        """
        ...


class TensorNorms:
    """Norms of ordinary tensors, and of DTensors (FSDP2, tensor parallel) over their mesh."""

    def squared(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of each tensor; see `LayerNorms`.

        Cost: one all-reduce for each axis of a mesh that shards some tensor, none without DTensors.

        Raises:
            UsageError: a DTensor holds partial sums, which have no norm yet.
        """
        del parameters
        squares = squared_norms([local(tensor) for tensor in tensors])
        axes: dict[tuple[DeviceMesh, int], list[int]] = {}
        for index, tensor in enumerate(tensors):
            for axis in _sharding_axes(tensor):
                axes.setdefault((tensor.device_mesh, axis), []).append(index)
        for (mesh, axis), members in axes.items():
            partial = squares[members]
            dist.all_reduce(partial, group=mesh.get_group(axis))
            squares[members] = partial
        return squares

    def total(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of all layers; see `LayerNorms`."""
        return self.squared(tensors, parameters).sum()


class ShardedNorms:
    """Norms of layers of which each rank of a group holds flat slices."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Add the squares over `group`; None is the default group, or one process without any."""
        self.group = group

    def squared(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of each layer; see `LayerNorms`. Cost: one all-reduce."""
        del parameters
        squares = squared_norms(tensors)
        if self.group is not None or dist.is_initialized():
            dist.all_reduce(squares, group=self.group)
        return squares

    def total(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of all layers; see `LayerNorms`."""
        return self.squared(tensors, parameters).sum()


class StageNorms:
    """Norms where each rank holds some layers of the model, or its part of each of them."""

    def __init__(self, group: dist.ProcessGroup | None, holders: Mapping[int, int]) -> None:
        """Add over the ranks of `group`.

        Args:
            group: all ranks of all stages and replicas; None is the default group.
            holders: number of ranks that hold the same of a parameter, by its `id`.
        """
        self.group = group
        self._holders = dict(holders)

    def squared(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of each layer of this rank; see `TensorNorms.squared`."""
        return TensorNorms().squared(tensors, parameters)

    def total(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of all layers of all ranks. Cost: one all-reduce of a number."""
        squares = squared_norms([local(tensor) for tensor in tensors])
        holders = [self._holders[id(parameter)] for parameter in parameters]
        # Each of a layer's holders brings an equal part of it.
        total = (squares / torch.tensor(holders, dtype=squares.dtype, device=squares.device)).sum()
        if self.group is not None or dist.is_initialized():
            dist.all_reduce(total, group=self.group)
        return total


class DividedNorms:
    """Norms where the ranks of a group have parts of some layers, and all of the others."""

    def __init__(self, group: dist.ProcessGroup | None, divided: Collection[int]) -> None:
        """Add over the ranks of `group` for the parameters whose `id` is in `divided`."""
        self.group = group
        self._divided = frozenset(divided)

    def squared(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of each layer; see `LayerNorms`. Cost: one all-reduce."""
        squares = squared_norms(tensors)
        parts = [n for n, parameter in enumerate(parameters) if id(parameter) in self._divided]
        if parts:
            sums = squares[parts]
            dist.all_reduce(sums, group=self.group)
            squares[parts] = sums
        return squares

    def total(
        self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the squared norm of all layers; see `LayerNorms`."""
        return self.squared(tensors, parameters).sum()


def squared_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared L2 norm of each tensor: shape (len(tensors),), float64.

    They are on the first tensor's device. Half-precision tensors are accumulated in float32.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    tensors = [as_real(tensor) for tensor in tensors]
    norms: list[torch.Tensor | None] = [None] * len(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        members = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        chosen = [tensors[index] for index in members]
        values = torch._foreach_norm(chosen, 2, dtype=wide)  # noqa: SLF001
        for index, value in zip(members, values, strict=True):
            norms[index] = value.to(tensors[0].device, torch.float64)
    return torch.stack(norms).square()


def _sharding_axes(tensor: torch.Tensor) -> list[int]:
    """Return the axes of the mesh along which ranks hold different elements."""
    if not isinstance(tensor, DTensor):
        return []
    placements = list(enumerate(tensor.placements))
    if any(placement.is_partial() for _, placement in placements):
        raise UsageError(
            "the norm of a DTensor with a Partial placement is not known",
            where=f"placements {tuple(tensor.placements)}",
            fix="Redistribute the gradient to the parameter's placements before the step",
        )
    return [axis for axis, placement in placements if not placement.is_replicate()]
