"""Keeps each client's last update, so that those who did not answer now are not forgotten.

With the last updates y of N clients, the model changes by

    mean over the answers of (delta_i - y_i)  +  mean over all N of y_j

and then y_i = delta_i. It is the mean update in expectation whoever answers, with less variance
the more alike a client's updates are from round to round; and where fast clients answer more often
than slow ones, the model still follows all.
Source: D. Jhunjhunwala et al., FedVARP: Tackling the Variance Due to Partial Client Participation
in Federated Learning, UAI 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class UpdateMemory:
    """The last update of each client; 4 bytes per parameter and client that has answered.

    Args:
        weights: of the clients in the global model; shape (clients,), any scale.
        parameters: of the model.
    """

    def __init__(self, weights: np.ndarray, parameters: int) -> None:
        self._weights = weights / weights.sum()
        self._last: dict[int, np.ndarray] = {}
        self._mean = np.zeros(parameters, np.float64)  # of all clients' last updates

    def combine(
        self, clients: Sequence[int], deltas: Sequence[np.ndarray], weights: Sequence[float]
    ) -> np.ndarray:
        """Return how the model changes by these answers; float32, shape (parameters,).

        Args:
            clients: who answered.
            deltas: their updates; float32, shape (parameters,).
            weights: of the answers among each other.
        """
        total = float(sum(weights))
        change = self._mean.copy()
        for client, delta, weight in zip(clients, deltas, weights, strict=True):
            difference = self._difference(client, delta)
            change += (weight / total) * difference
        for client, delta in zip(clients, deltas, strict=True):
            self._mean += self._weights[client] * self._difference(client, delta)
            self._last[client] = delta
        return change.astype(np.float32)

    def distance(self, client: int, delta: np.ndarray) -> float:
        """Return how far an update is from the client's last one."""
        return float(np.linalg.norm(self._difference(client, delta)))

    def _difference(self, client: int, delta: np.ndarray) -> np.ndarray:
        last = self._last.get(client)
        return delta if last is None else delta - last

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"last": dict(self._last), "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._last = {int(client): last for client, last in state["last"].items()}
        self._mean[:] = state["mean"]
