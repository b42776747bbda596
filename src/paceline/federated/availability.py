"""How likely each client is to answer, from its answers and silences so far.

    P(it answers) = (answers + 1) / (answers + silences + 1)

so that it is 1 until a client is silent for the first time. A silence is a deadline that passed, or
a client that left while it worked; work of which the client itself says that it was lost is none.
Both counts halve with time: what kept a client away may have ended, and it is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

_HALF_LIFE_S, _HALF_LIFE_DEADLINES = 3600.0, 5.0  # of what was seen; the longer one


@dataclass(slots=True)
class AvailabilityProfile:
    """Estimates of all clients, by their numbers.

    Attributes:
        clients: how many there are.
    """

    clients: int
    _answers: np.ndarray = field(init=False)  # discounted, as the silences, at `_seen_s`
    _silences: np.ndarray = field(init=False)
    _seen_s: np.ndarray = field(init=False)
    _half_life_s: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._answers, self._silences = np.zeros(self.clients), np.zeros(self.clients)
        self._seen_s = np.zeros(self.clients)
        self._half_life_s = np.full(self.clients, _HALF_LIFE_S)

    def observe(self, now_s: float, client: int, *, answered: bool, allowed_s: float) -> None:
        """Learn from work that has ended.

        Args:
            now_s: seconds of a clock that never goes back.
            client: its number.
            answered: whether the client was heard of.
            allowed_s: seconds that it had.
        """
        kept = self._kept(now_s)[client]
        self._answers[client] = kept * self._answers[client] + answered
        self._silences[client] = kept * self._silences[client] + (not answered)
        self._seen_s[client] = now_s
        self._half_life_s[client] = max(_HALF_LIFE_S, _HALF_LIFE_DEADLINES * allowed_s)

    def answers(self, now_s: float) -> np.ndarray:
        """Return the probabilities that clients answer; shape (clients,)."""
        kept = self._kept(now_s)
        answers = kept * self._answers + 1
        probabilities: np.ndarray = answers / (answers + kept * self._silences)
        return probabilities

    def _kept(self, now_s: float) -> np.ndarray:
        """Return the weights of what was seen so long ago."""
        kept: np.ndarray = 0.5 ** ((now_s - self._seen_s) / self._half_life_s)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {
            "answers": self._answers.tolist(),
            "silences": self._silences.tolist(),
            "seen": self._seen_s.tolist(),
            "half_life": self._half_life_s.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._answers[:], self._silences[:] = state["answers"], state["silences"]
        self._seen_s[:], self._half_life_s[:] = state["seen"], state["half_life"]
