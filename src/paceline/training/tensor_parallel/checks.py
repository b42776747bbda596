"""What a model with divided layers does not go with, and what its ranks must have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.training.engine.optimizer_checks import check_elementwise, check_stateless
from paceline.training.engine.ranks import computed_by_all
from paceline.training.tensor_parallel.choice import divisible, neighbours, not_divisible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn

    from paceline.training.engine.ranks import Ranks
    from paceline.training.options import TrainingOptions
    from paceline.training.tensor_parallel.choice import DividedLayer


def check_tensor_parallel(options: TrainingOptions, ranks: Ranks) -> None:
    """Raise an error for options that a model with divided layers does not have.

    Raises:
        UsageError: it has one of them.
    """
    given = {
        "engine": (options.engine not in (None, "allreduce"), "Use the engine allreduce"),
        "compression": (options.compression is not None, "Leave it out"),
        "memory_budget": (options.memory_budget is not None, "Leave it out"),
        "overlap": (
            bool(options.overlap) and ranks.heap is not None,
            "Leave it out: within a host ranks would wait in different reductions",
        ),
    }
    for name, (is_given, fix) in given.items():
        if is_given:
            raise UsageError(
                f"a model with divided layers has no {name} {getattr(options, name)!r}",
                where=f"prepare({name}=..., tensor_parallel=...)",
                fix=fix,
            )
    shared_by = options.tensor_parallel_ranks
    if shared_by is not None and ranks.size % shared_by:
        raise UsageError(
            f"{ranks.size} ranks do not divide into groups of {shared_by}",
            where="prepare(tensor_parallel_ranks=...)",
            fix="Give a divisor of the number of ranks, such as the ranks of a host",
        )


def check_alike(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layers: Sequence[DividedLayer],
    ranks: Ranks,
    shared_by: int,
) -> None:
    """Raise an error on all ranks unless the layers divide in the same way on each of them.

    The ranks' parameters have the same names and shapes by now: what computes with them, or updates
    them, may differ all the same, on the ranks of a group and between the groups.
    """
    where = "prepare(tensor_parallel=...)"

    def own() -> list[tuple[str, str]]:
        _check_optimizer(optimizer)
        return list(_kinds(model, layers, shared_by))

    every = computed_by_all(own, ranks, where)
    for rank, kinds in enumerate(every):
        for (name, kind), (_, expected) in zip(kinds, every[0], strict=True):
            if kind != expected:
                raise UsageError(
                    f"the layer {name} of rank {rank} cannot be divided as that of rank 0",
                    where=where,
                    why=f"on rank {rank} it is {kind}, and {expected} on rank 0",
                    fix="Build the same model on all ranks, and freeze the same parameters",
                )


def _kinds(
    model: nn.Module, layers: Sequence[DividedLayer], shared_by: int
) -> Iterator[tuple[str, str]]:
    """Yield the name of each divided layer, and what ranks must have in common of it."""
    can, why_not = divisible(model, shared_by)
    pairs = set(neighbours(model, {layer.name for layer in layers}))
    for name, division, first in layers:
        if name not in can:
            raise not_divisible(model, name, why_not, can)
        trained = [key for key, p in can[name].named_parameters() if p.requires_grad]
        kind = f"divided by its {division}, with {' and '.join(trained) or 'nothing'} to train"
        if first is not None:
            kind += f", {'next to' if (first, name) in pairs else 'apart from'} {first}"
        yield name, kind


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error for an optimizer that cannot update parts."""
    check_elementwise(optimizer, "prepare(tensor_parallel=...)")
    check_stateless(optimizer)
