"""Whether the training fits into each client's memory: what it claims, then what happened.

    a peak that a client reports      it fits, whatever it claims, until the client refuses
    a refusal for want of memory      it does not fit for a while; twice as long at each one more
    a claim alone                     it fits if the claim is at least what training typically takes
    nothing                           it is tried

What training takes is the median of all clients' last peaks: one client's report cannot shut out
the others. A refusal is not for ever, since other work on the device may end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PAUSE_S = 300.0  # after a first refusal
_MOST_DOUBLED = 4  # then the pause is 80 minutes


@dataclass(slots=True)
class MemoryProfile:
    """What is known of all clients' memory, by their numbers.

    Attributes:
        clients: how many there are.
    """

    clients: int
    _claimed: np.ndarray = field(init=False)  # bytes; nan: no claim
    _peak: np.ndarray = field(init=False)  # bytes; nan: none was reported
    _refusals: np.ndarray = field(init=False)  # since the last success
    _refused_s: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._claimed, self._peak = np.full(self.clients, np.nan), np.full(self.clients, np.nan)
        self._refusals = np.zeros(self.clients, np.int64)
        self._refused_s = np.zeros(self.clients)

    def claim(self, client: int, free_bytes: float) -> None:
        """Take a client's word for the memory that it has to spare."""
        self._claimed[client] = free_bytes

    def observe(self, client: int, peak_bytes: float) -> None:
        """Note that a client's training succeeded, with this peak of memory; 0: not reported."""
        self._refusals[client] = 0
        if peak_bytes > 0:
            self._peak[client] = peak_bytes

    def refused(self, now_s: float, client: int) -> None:
        """Note that a client had too little memory for the training."""
        self._refusals[client] += 1
        self._refused_s[client] = now_s
        self._peak[client] = np.nan  # that it fitted once says nothing now

    @property
    def needed_bytes(self) -> float:
        """The median of the clients' last peaks; nan before any."""
        known = self._peak[np.isfinite(self._peak)]
        return float(np.median(known)) if known.size else math.nan

    def fits(self, now_s: float) -> np.ndarray:
        """Return whom the training is expected to fit; bool, shape (clients,)."""
        too_small = self._claimed < self.needed_bytes  # false where either is not known
        fitting: np.ndarray = (self._paused_until_s() <= now_s) & ~(
            too_small & np.isnan(self._peak)
        )
        return fitting

    def next_try_s(self, now_s: float) -> float:
        """Return when the next pause after a refusal ends; inf: there is none."""
        ends = self._paused_until_s()
        return float(ends[ends > now_s].min(initial=math.inf))

    def _paused_until_s(self) -> np.ndarray:
        """Return the ends of the pauses after refusals; -inf where there was none."""
        doubled = 2.0 ** np.clip(self._refusals - 1, 0, _MOST_DOUBLED)
        return np.where(self._refusals > 0, self._refused_s + _PAUSE_S * doubled, -math.inf)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {
            "claimed": self._claimed.tolist(),
            "peak": self._peak.tolist(),
            "refusals": self._refusals.tolist(),
            "refused": self._refused_s.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._claimed[:], self._peak[:] = state["claimed"], state["peak"]
        self._refusals[:], self._refused_s[:] = state["refusals"], state["refused"]
