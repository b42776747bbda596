"""Selection by four goals with weights: fast, resource-fair, accuracy-fair, model quality.

Each goal is a preference in units of ln, so that a weight says how strongly probabilities follow
it; a free client is drawn with a probability in proportion to

    exp( fast * -ln(expected seconds)   + quality * ln(surprise)
       + resource_fair * -ln(seconds spent) + accuracy_fair * ln(loss) )

each centred on its median, times the probability that it answers at all. Before that stand a floor
and a ceiling: clients that were asked less than a share of the mean come first, and those that were
asked many times as often come last, so that nobody drops out whom the weights do not favour, and
nobody does all the work.

While accuracy rises, `fast` counts more; when it stops rising, `quality` and `accuracy_fair` do.
Source of the goals: J. Han et al., Heterogeneity-Aware Adaptive Federated Learning Scheduling, IEEE
BigData 2022 (its formulas are not public; these are ours). Drawing without replacement:
W. Kool et al., Stochastic Beams and Where to Find Them, ICML 2019 (Gumbel-top-k).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.federated.selection.view import ClientsView

_SLOPE_WINDOW = 6  # evaluations
_RISING, _FLAT = 0.004, 0.0005  # accuracy per evaluation
_SHIFT = 1.5  # factor of the weights that count more


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals(Record):
    """How much each goal counts; 0: not at all.

    Attributes:
        fast: clients that answer soon.
        resource_fair: clients that have worked little.
        accuracy_fair: clients on whose data the model is poor.
        quality: clients whose updates tell most.
        floor: the least participation of a client that is online, over the mean.
        ceiling: the largest one; clients above it are asked if there are no others.
    """

    fast: float = 0.5
    resource_fair: float = 0.5
    accuracy_fair: float = 0.0
    quality: float = 0.5
    floor: float = 0.6
    ceiling: float = 2.5

    def __post_init__(self) -> None:
        for name in ("fast", "resource_fair", "accuracy_fair", "quality"):
            if not 0 <= getattr(self, name) <= 10:
                raise UsageError(
                    f"the goal {name} has the weight {getattr(self, name)}",
                    where="goals",
                    fix="Give weights from 0 to 10",
                )
        if not 0 <= self.floor < 1 < self.ceiling:
            raise UsageError(
                f"participation from {self.floor} to {self.ceiling} times the mean is not possible",
                where="goals",
                fix="Give a floor of at least 0 and below 1, and a ceiling above 1",
            )

    def adapted(self, accuracy: Sequence[float]) -> Goals:
        """Return the weights that go with the trend of the accuracy, oldest first."""
        recent = accuracy[-_SLOPE_WINDOW:]
        if len(recent) < _SLOPE_WINDOW:
            return self
        slope = float(np.polyfit(np.arange(len(recent)), recent, 1)[0])
        if slope > _RISING:
            return replace(self, fast=min(10.0, self.fast * _SHIFT))
        if slope < _FLAT:
            return replace(
                self,
                quality=min(10.0, self.quality * _SHIFT),
                accuracy_fair=min(10.0, self.accuracy_fair * _SHIFT),
            )
        return self


class GoalSelector:
    """Draws clients by goals; those below the floor of participation first.

    Args:
        goals: weights.
        rng: of the draws.
    """

    name = "goals"

    def __init__(self, goals: Goals, rng: np.random.Generator) -> None:
        self._goals, self._rng = goals, rng

    def choose(self, view: ClientsView, count: int) -> np.ndarray:
        """Return the numbers of at most `count` free clients."""
        free = np.flatnonzero(view.is_free)
        if not free.size:
            return free
        goals = self._goals.adapted(view.accuracy)
        preference = sum(
            weight * _centred(values[free])
            for weight, values in (
                (goals.fast, -np.log(view.expected_s)),
                (goals.resource_fair, -np.log1p(view.spent_s)),
                (goals.accuracy_fair, _log(view.loss)),
                (goals.quality, _log(view.surprise)),
            )
            if weight
        )
        drawn = preference + np.log(view.answers[free]) + self._rng.gumbel(size=free.size)
        share = view.selected[free] / max(1.0, float(view.selected.mean()))
        turn = (share >= goals.floor).astype(int) + (share > goals.ceiling)  # 0 comes first
        order = np.lexsort((-drawn, turn))
        chosen: np.ndarray = free[order[:count]]
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._rng.bit_generator.state = state["rng"]


def _log(values: np.ndarray) -> np.ndarray:
    """Return the logarithms; of what is not known, the largest known one: it is worth trying."""
    known = values[np.isfinite(values) & (values > 0)]
    least, most = (known.min(), known.max()) if known.size else (1.0, 1.0)
    filled = np.where(np.isfinite(values), np.maximum(values, least), most)
    return np.log(filled)


def _centred(values: np.ndarray) -> np.ndarray:
    centred: np.ndarray = values - np.median(values)
    return centred
