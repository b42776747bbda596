"""Which clients are asked next."""

from paceline.federated.selection.baselines import (
    OortSelector,
    PowerOfChoice,
    RandomSelector,
    TiflSelector,
)
from paceline.federated.selection.goals import Goals, GoalSelector
from paceline.federated.selection.view import ClientsView, Selector

__all__ = [
    "ClientsView",
    "GoalSelector",
    "Goals",
    "OortSelector",
    "PowerOfChoice",
    "RandomSelector",
    "Selector",
    "TiflSelector",
]
