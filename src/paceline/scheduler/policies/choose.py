"""Policies as a user asks for them: by name, with an objective, at every event or in rounds."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from paceline.core.errors import UsageError
from paceline.core.record import nearest
from paceline.scheduler.policies.paceline import OBJECTIVES
from paceline.scheduler.policies.registry import POLICIES
from paceline.scheduler.policies.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.scheduler.decide import Policy


def make_policies(
    names: Sequence[str], *, objective: str | None = None, round_s: float | None = None
) -> list[Policy]:
    """Return new policies by name, in the order of the names.

    Args:
        names: of `POLICIES`; ``all`` stands for all of them.
        objective: one of `OBJECTIVES`, for policies that can choose; None: their own.
        round_s: interval at which they act; None: at every event.

    Raises:
        UsageError: a name or the objective is unknown, or no policy can choose its objective.
    """
    chosen: dict[str, Callable[..., Policy]] = {}
    for name in names:
        if name == "all":
            chosen |= POLICIES
        elif name in POLICIES:
            chosen[name] = POLICIES[name]
        else:
            raise UsageError(f"no policy '{name}'", fix=nearest(name, [*POLICIES, "all"]))
    if objective is not None and objective not in OBJECTIVES:
        raise UsageError(f"no objective '{objective}'", fix=nearest(objective, OBJECTIVES))
    choosers = {name for name, make in chosen.items() if _has_objective(make)}
    if objective is not None and not choosers:
        raise UsageError(
            f"none of {', '.join(chosen)} can choose its objective",
            fix="Leave out the objective, or name a policy that has one",
        )
    policies: list[Policy] = []
    for name, make in chosen.items():
        asked = {} if objective is None or name not in choosers else {"objective": objective}
        policy = make(**asked)
        policies.append(policy if round_s is None else Rounds(policy, round_s))
    return policies


def _has_objective(make: Callable[..., Any]) -> bool:
    return "objective" in inspect.signature(make).parameters
