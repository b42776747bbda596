"""Which optimizers an engine takes that gives each rank a part of the parameters."""

from __future__ import annotations

import inspect

import torch

from paceline.core.errors import UsageError
from paceline.training.optimizers.layerwise import LayerwiseOptimizer

# Each element of a parameter is updated by its own gradient and state, and by nothing else.
_ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
    *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)


def check_elementwise(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raise an error unless an optimizer updates a part of a tensor as it would in the whole.

    Paceline's LARS and LAMB take their norms of all parts. An optimizer that is not of torch says
    so with an attribute ``is_elementwise = True``.

    Raises:
        UsageError: it may look at whole tensors, or it is not known.
    """
    kind = type(optimizer)
    if isinstance(optimizer, LayerwiseOptimizer) or getattr(optimizer, "is_elementwise", False):
        return
    step = inspect.unwrap(kind.step)
    if any(step is inspect.unwrap(known.step) for known in _ELEMENTWISE):
        return
    raise UsageError(
        f"{kind.__name__} may look at whole tensors, of which each rank updates a part",
        where=where,
        why="of torch's optimizers those that update each element by itself do not",
        fix="Use engine='allreduce' without division of layers, or one such as SGD, Adam, LARS or "
        "LAMB. One of your own that updates each element by itself says so with an attribute "
        "is_elementwise = True",
    )


def refuse_lbfgs(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raise an error for LBFGS, which looks at all parameters, and runs the model in its step.

    Raises:
        UsageError: it is LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS looks at the gradients of all parameters, of which each rank has some or none",
            where=where,
            fix="Use another optimizer, or leave the model undivided with engine='allreduce'",
        )


def check_stateless(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error unless an optimizer can take parts of its parameters in their place.

    Raises:
        UsageError: it has state already, which belongs to whole parameters.
    """
    if optimizer.state:
        raise UsageError(
            "the optimizer has state already",
            where=type(optimizer).__name__,
            why="its state belongs to whole parameters, and each rank will update parts",
            fix="Call prepare before the first step, and load a checkpoint after it",
        )
