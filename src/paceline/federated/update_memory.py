"""Keeps each client's last update, so that those who do not answer now are not forgotten.

With the last updates y of the clients that have ever answered, and their weighted mean m, the model
changes by

    mean over the answers of (delta_i - y_i)  +  m          y_i = m at a client's first answer

and then y_i = delta_i. In expectation it is the mean update of any clients that answer, with less
variance the more alike a client's updates are from round to round; and where fast clients answer
more often than slow ones, the model still follows all.
Source: D. Jhunjhunwala et al., FedVARP: Tackling the Variance Due to Partial Client Participation
in Federated Learning, UAI 2022; there y_i = 0 at first, and m is over all clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class UpdateMemory:
    """The last update of each client; 4 bytes per parameter and client that has answered.

    Args:
        weights: of the clients in the global model; shape (clients,), any scale. Not to be changed
            for a client that has answered.
        parameters: of the model.
    """

    def __init__(self, weights: np.ndarray, parameters: int) -> None:
        self._weights = weights
        self._last: dict[int, np.ndarray] = {}
        self._held: dict[int, float] = {}  # weights with which the last updates are in the sum
        self._sum = np.zeros(parameters, np.float64)  # of weighted last updates
        self._total = 0.0  # weight of the clients that have answered

    def combine(
        self,
        clients: Sequence[int],
        deltas: Sequence[np.ndarray],
        weights: Sequence[float],
        factors: Sequence[float] = (),
    ) -> np.ndarray:
        """Return how the model changes by these answers; float32, shape (parameters,).

        Args:
            clients: who answered.
            deltas: their updates; float32, shape (parameters,).
            weights: of the answers among each other.
            factors: by which the clients' weights in the global model differ until they answer
                again; empty: 1.
        """
        total = float(sum(weights))
        mean = self._mean()
        change = mean.copy()
        for client, delta, weight in zip(clients, deltas, weights, strict=True):
            change += np.float32(weight / total) * (delta - self._last.get(client, mean))
        for client, delta, factor in zip(
            clients, deltas, factors or [1.0] * len(clients), strict=True
        ):
            self._replace(client, delta, float(self._weights[client]) * factor)
        return change.astype(np.float32)

    def distance(self, client: int, delta: np.ndarray) -> float:
        """Return how far an update is from what was expected of the client."""
        last = self._last.get(client)
        return float(np.linalg.norm(delta - (self._mean() if last is None else last)))

    def _mean(self) -> np.ndarray:
        return self._sum / self._total if self._total else self._sum

    def _replace(self, client: int, delta: np.ndarray, weight: float) -> None:
        before = self._held.get(client, 0.0)
        if before == weight:
            self._sum += np.float32(weight) * (delta - self._last[client])
        else:
            if client in self._last:
                self._sum -= np.float32(before) * self._last[client]
            self._sum += np.float32(weight) * delta
            self._total += weight - before
        self._last[client], self._held[client] = delta, weight

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        held = {"last": dict(self._last), "held": dict(self._held)}
        return {**held, "sum": self._sum, "total": self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._last = {int(client): last for client, last in state["last"].items()}
        self._held = {int(client): weight for client, weight in state["held"].items()}
        self._sum[:], self._total = state["sum"], state["total"]
