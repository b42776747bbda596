"""What this rank holds of a tensor: all of an ordinary one, a part of a DTensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: its own storage, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients it would be a node of the graph
        return tensor.to_local()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real and imaginary parts, not a copy; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return local values as a part of a whole that is laid out as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch has no types here
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; of a DTensor gathered from the ranks of its mesh, which all call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch has no types here
def part_of(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole that every rank has, laid out as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(
        values.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,  # no message: all have the same
    )
