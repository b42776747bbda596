"""What a selector sees, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientsView:
    """All clients at one moment; arrays have the shape (clients,).

    Attributes:
        is_free: online, not at work, and with enough memory as far as is known.
        expected_s: seconds that a round trip is expected to take.
        is_measured: whether a round trip was measured.
        selected: how often each was asked; a time without an answer counts several times.
        returned: how often an update of it was used.
        spent_s: seconds that it has worked.
        loss: root mean square of its samples' losses at its last update, as it says; or nan.
        samples: that it says it has.
        surprise: distance of its last update from the one before, as measured; or nan.
        answers: probability that it answers at all; 1 until it has been silent.
        last_round: of the model that it last started from; -1: none.
        round: of the current model, from 0.
        accuracy: smoothed accuracies of the global model, oldest first.
    """

    is_free: np.ndarray
    expected_s: np.ndarray
    is_measured: np.ndarray
    selected: np.ndarray
    returned: np.ndarray
    spent_s: np.ndarray
    loss: np.ndarray
    samples: np.ndarray
    surprise: np.ndarray
    answers: np.ndarray
    last_round: np.ndarray
    round: int
    accuracy: Sequence[float]


class Selector(Protocol):
    """Chooses which clients are asked."""

    @property
    def name(self) -> str:
        """Name, as users give it."""

    def choose(self, view: ClientsView, count: int) -> np.ndarray:
        """Return the numbers of at most `count` free clients, each once."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
