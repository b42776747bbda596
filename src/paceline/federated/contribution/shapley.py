"""Shapley values of the clients of a round: what each adds to the round's change of the model.

A game gives every coalition of the round's clients a value: the utility of the model after their
updates alone, on data that the server trusts. The Shapley value of a client is its marginal value,
averaged over all orders in which the clients could join.

How a coalition's change is made of its updates decides what a client without content gets:

    fixed       sum over the coalition of update / n, n = all clients of the round
    averaged    mean over the coalition, as in the source

With fixed weights an update of zeros adds exactly nothing, so that its value is 0: the null player
of the theory. With averages it dilutes what is there, which is worth something wherever the
coalition overshoots or is biased: averages pay free riders (docs/guides/federated-contribution.md
has figures). Fixed weights are the default.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_EXACT = 16


class CoalitionGame:
    """The value of any coalition of the updates of a round; each is computed once.

    Holds one vector besides the updates: a coalition that extends the one before by a client costs
    one addition, and any other one as many as it has members.

    Args:
        deltas: of the clients; float32, shape (parameters,).
        utility: of the model after a change; finite, and higher is better. The change that it gets
            is overwritten afterwards.
        averaged: divide by the size of the coalition in place of the number of all clients.

    Attributes:
        evaluations: calls of `utility` so far.
    """

    def __init__(
        self,
        deltas: Sequence[np.ndarray],
        utility: Callable[[np.ndarray], float],
        *,
        averaged: bool = False,
    ) -> None:
        if not deltas:
            raise UsageError(
                "a game needs at least one update",
                where="contribution",
                fix="Score only rounds in which an update was accepted",
            )
        self.players = len(deltas)
        self.evaluations = 0
        self._deltas, self._utility, self._averaged = deltas, utility, averaged
        self._values: dict[frozenset[int], float] = {}
        self._members: tuple[int, ...] = ()
        self._sum = np.zeros(deltas[0].size, np.float32)

    def value(self, coalition: Sequence[int]) -> float:
        """Return the utility of the model after the updates of a coalition.

        Raises:
            UsageError: the utility is not finite.
        """
        key = frozenset(coalition)
        if key not in self._values:
            found = float(self._utility(self._change(tuple(coalition))))
            self.evaluations += 1
            if not math.isfinite(found):
                raise UsageError(
                    f"the utility of a coalition of {len(key)} clients is {found}",
                    where="contribution",
                    fix="Bound the utility, for example by a least probability in a likelihood",
                )
            self._values[key] = found
        return self._values[key]

    def _change(self, coalition: tuple[int, ...]) -> np.ndarray:
        if coalition[:-1] == self._members and coalition:
            added = coalition[-1:]
        else:
            self._sum[:] = 0
            added = coalition
        for player in added:
            self._sum += self._deltas[player]
        self._members = coalition
        size = len(coalition) if self._averaged else self.players
        return self._sum * np.float32(1 / max(1, size))


def exact_shapley(game: CoalitionGame) -> np.ndarray:
    """Return the Shapley values; float64, shape (players,). They add up to the whole game's value.

    Cost: 2^players evaluations.

    Raises:
        UsageError: there are more than 16 players.
    Source: L. S. Shapley, A Value for n-Person Games, 1953, equation 12.
    """
    count = game.players
    if count > _MOST_EXACT:
        raise UsageError(
            f"exact Shapley values of {count} clients take 2^{count} evaluations",
            where="contribution",
            fix=f"Use gtg_shapley above {_MOST_EXACT}",
        )
    shares = np.zeros(count)
    for size in range(count):
        weight = 1 / (count * math.comb(count - 1, size))
        for coalition in itertools.combinations(range(count), size):
            without = game.value(coalition)
            for player in set(range(count)).difference(coalition):
                shares[player] += weight * (game.value((*coalition, player)) - without)
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapleyOptions:
    """How far values are approximated.

    Attributes:
        round_tolerance: a round that changes the utility by less pays nobody (between-round
            truncation).
        order_tolerance: share of the round's change; once what is left of it is less, the rest of
            an order adds nothing (within-round truncation).
        convergence: relative change of the values from sweep to sweep at which to end.
        least_sweeps, most_sweeps: of as many orders as there are clients.
    """

    round_tolerance: float = 1e-5
    order_tolerance: float = 0.01
    convergence: float = 0.05
    least_sweeps: int = 2
    most_sweeps: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.least_sweeps <= self.most_sweeps:
            raise UsageError(
                f"{self.least_sweeps} to {self.most_sweeps} sweeps are not possible",
                where="contribution",
                fix="Give 1 <= least_sweeps <= most_sweeps",
            )


def gtg_shapley(
    game: CoalitionGame, rng: np.random.Generator, options: ShapleyOptions | None = None
) -> np.ndarray:
    """Return approximate Shapley values by guided, truncated orders; float64, shape (players,).

    Each sweep begins one order with each client, since the first places of an order matter most;
    the rest of an order is random, and in the next sweep the reverse of it: who was early is late,
    which takes most of the variance away. No model is trained again: coalitions are rebuilt from
    updates.

    Cost: at most most_sweeps x players^2 evaluations.
    Source: Z. Liu et al., GTG-Shapley: Efficient and Accurate Participant Contribution Evaluation
        in Federated Learning, ACM TIST 2022 (arXiv 2109.02053), algorithm 1; the reversed orders:
        R. Mitchell et al., Sampling Permutations for Shapley Value Estimation, JMLR 2022, section
        3 (antithetic sampling).
    """
    options = options or ShapleyOptions()
    count = game.players
    begin, end = game.value(()), game.value(range(count))
    totals = np.zeros(count)
    if abs(end - begin) < options.round_tolerance:
        return totals
    tolerance = options.order_tolerance * abs(end - begin)
    before = totals.copy()
    rest: list[list[int]] = []
    for sweep in range(1, options.most_sweeps + 1):
        if sweep % 2:
            rest = [
                rng.permutation([player for player in range(count) if player != first]).tolist()
                for first in range(count)
            ]
        for first in range(count):
            order = [first, *(rest[first] if sweep % 2 else rest[first][::-1])]
            _add_order(game, order, totals, (begin, end, tolerance))
        values = totals / (sweep * count)
        scale = max(float(np.abs(values).mean()), 1e-12)
        if sweep >= options.least_sweeps and np.abs(values - before).mean() < (
            options.convergence * scale
        ):
            break
        before = values
    return np.asarray(values)


def _add_order(
    game: CoalitionGame,
    order: list[int],
    totals: np.ndarray,
    truncation: tuple[float, float, float],
) -> None:
    """Add the marginal values of the clients in one order."""
    reached, end, tolerance = truncation
    for length in range(1, len(order) + 1):
        if abs(end - reached) < tolerance:
            return
        value = game.value(order[:length])
        totals[order[length - 1]] += value - reached
        reached = value
