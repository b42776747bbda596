"""What an update of LBFGS costs: it runs the model, and its history is many vectors long.

An update makes `max_iter` iterations, and evaluates the loss and its gradient once for each. With a
full history of m pairs of vectors an iteration takes 2m scalar products and 2m additions of vectors
of all n parameters, and some ten vector operations besides. How many iterations an update really
makes follows from the values of the loss: fewer when it converges, more evaluations with a line
search.

Source: Nocedal and Wright, Numerical Optimization, 2nd edition, algorithm 7.4 (two-loop recursion);
torch.optim.LBFGS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_OTHER_VECTORS = 10  # operations of an iteration on whole vectors, beside the two loops
_STATE_VECTORS = 3  # direction, last gradient, and a copy of the parameters


class VectorCalls(NamedTuple):
    """Equal operations on vectors of all parameters: how many, and the bytes that one moves."""

    calls: int
    bytes: int


def evaluations(optimizer: torch.optim.LBFGS) -> int:
    """Return how often an update evaluates the loss, if it does not end early."""
    (group,) = optimizer.param_groups
    return int(min(group["max_iter"], group["max_eval"]))


def vector_calls(optimizer: torch.optim.LBFGS) -> Iterator[VectorCalls]:
    """Yield the operations of an update with a full history."""
    (group,) = optimizer.param_groups
    iterations, pairs = evaluations(optimizer), 2 * group["history_size"]
    size = _vector_bytes(optimizer)
    yield VectorCalls(iterations * pairs, 2 * size)
    yield VectorCalls(iterations * (pairs + _OTHER_VECTORS), 3 * size)


def state_bytes(optimizer: torch.optim.LBFGS) -> int:
    """Return the bytes that LBFGS keeps between updates, with a full history."""
    (group,) = optimizer.param_groups
    return (2 * int(group["history_size"]) + _STATE_VECTORS) * _vector_bytes(optimizer)


def _vector_bytes(optimizer: torch.optim.LBFGS) -> int:
    (group,) = optimizer.param_groups
    return sum(parameter.nbytes for parameter in group["params"] if parameter.requires_grad)
