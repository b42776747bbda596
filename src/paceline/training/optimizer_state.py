"""An optimizer's state by parameter name, in place of torch's numbers.

    torch       {"state": {0: ...}, "param_groups": [{"params": [0, 1], "lr": ...}]}
    by name     {"state": {"0.weight": ...}, "groups": [{"names": ["0.weight", ...], "lr": ...}]}

Numbers change when a model or its groups change; and where ranks update parts of parameters, each
rank's numbers mean other tensors.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.optim import Optimizer

State = dict[str, dict[str, Any]]  # of parameters, by name


def named_state(optimizer: Optimizer, names: Mapping[int, str]) -> tuple[State, list[Any]]:
    """Return the state by parameter name, and the groups with names and settings.

    Args:
        optimizer: whose tensors are not copied.
        names: of its parameters, by `id`.
    """
    plain = optimizer.state_dict()
    by_number = dict(_numbered(optimizer, plain["param_groups"], names))
    state = {by_number[number]: dict(values) for number, values in plain["state"].items()}
    groups = []
    for group in plain["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"names": [by_number[number] for number in group["params"]], **settings})
    return state, groups


def load_named_state(
    optimizer: Optimizer, names: Mapping[int, str], state: State, groups: list[Any]
) -> None:
    """Load what `named_state` returned; copies the tensors, which torch would share.

    Raises:
        UsageError: the optimizer's groups have other parameters.
    """
    plain = optimizer.state_dict()
    by_number = dict(_numbered(optimizer, plain["param_groups"], names))
    own = [[by_number[number] for number in group["params"]] for group in plain["param_groups"]]
    saved = [group["names"] for group in groups]
    if own != saved:
        lacking = sorted(set(itertools.chain(*own)) - set(itertools.chain(*saved)))
        why = f"{lacking[0]} is not in the state" if lacking else "their groups or order differ"
        raise UsageError(
            "the optimizer updates other parameters than the one whose state was saved",
            where=type(optimizer).__name__,
            why=why,
            fix="Make model, optimizer and groups as when the state was saved",
        )
    for group, given in zip(plain["param_groups"], groups, strict=True):
        group.update({key: value for key, value in given.items() if key != "names"})
    numbers = {name: number for number, name in by_number.items()}
    plain["state"] = {
        numbers[name]: {key: _copied(value) for key, value in values.items()}
        for name, values in state.items()
    }
    optimizer.load_state_dict(plain)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _numbered(
    optimizer: Optimizer, groups: list[dict[str, Any]], names: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Yield torch's number and the name of each parameter."""
    for own, plain in zip(optimizer.param_groups, groups, strict=True):
        for parameter, number in zip(own["params"], plain["params"], strict=True):
            yield number, names[id(parameter)]
