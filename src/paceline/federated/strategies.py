"""Ways to run a federation: who is asked, how rounds go, how updates are combined.

`paceline` is ours; the others are published ones, to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.record import nearest
from paceline.federated.rounds import RoundOptions
from paceline.federated.selection import (
    Goals,
    GoalSelector,
    OortSelector,
    PowerOfChoice,
    RandomSelector,
    Selector,
    TiflSelector,
)

_OVER = 1.3  # times as many clients start as are waited for
_IN_FLIGHT = 1.5  # times the cohort work at any time


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way.

    Attributes:
        rounds: how they go.
        make_selector: returns what chooses clients.
        remembers: whether each client's last update stands for it while it does not answer.
        loss_power: of the losses by which updates are weighed beside their sizes; 0: not at all.
    """

    rounds: RoundOptions
    make_selector: Callable[[np.random.Generator], Selector]
    remembers: bool = False
    loss_power: float = 0.0


def make_strategy(name: str, cohort: int, goals: Goals | None = None) -> Strategy:
    """Return a strategy.

    Args:
        name: one of `STRATEGIES`.
        cohort: updates that make a new model.
        goals: of ``paceline``; None: the default ones.

    Raises:
        UsageError: there is no such strategy.
    """
    synchronous = RoundOptions(cohort=cohort, in_flight=0)
    over = RoundOptions(cohort=cohort, in_flight=0, over_selection=_OVER)
    buffered = RoundOptions(cohort=cohort, in_flight=round(_IN_FLIGHT * cohort))
    found = {
        "paceline": Strategy(
            rounds=buffered,
            make_selector=lambda rng: GoalSelector(goals or Goals(), rng),
            remembers=True,
            loss_power=(goals or Goals()).accuracy_fair,
        ),
        "random": Strategy(rounds=synchronous, make_selector=RandomSelector),
        "over-selected": Strategy(rounds=over, make_selector=RandomSelector),
        "power-of-choice": Strategy(rounds=synchronous, make_selector=PowerOfChoice),
        "tifl": Strategy(rounds=synchronous, make_selector=TiflSelector),
        "oort": Strategy(rounds=over, make_selector=OortSelector),
        "fedbuff": Strategy(rounds=buffered, make_selector=RandomSelector),
    }
    if name not in found:
        raise UsageError(
            f"there is no strategy {name}",
            where="federation",
            fix=nearest(name, STRATEGIES),
        )
    return found[name]


STRATEGIES = ("paceline", "random", "over-selected", "power-of-choice", "tifl", "oort", "fedbuff")
