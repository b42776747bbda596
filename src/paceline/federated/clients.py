"""What is known of each client: its own claims first, then what the server measured.

Seconds per sample and per byte are estimated in logarithms, since both vary by factors:

    prior (claim, or the mean of all clients) -> N(mean, variance) of ln(seconds)
    each measurement                          -> a Kalman step: variance falls
    time since                                -> variance grows: devices drift while they are used
    a measurement beyond all expectation      -> variance jumps: other work has begun, or ended

The wait before a job begins, as in a facility's queue, is estimated in the same way, per job.
Whether a client answers, and whether the training fits into its memory: `availability`,
`client_memory`.

A claim counts as one poor measurement, so that the third round trip outweighs any claim.
Source: R. Kalman, A New Approach to Linear Filtering and Prediction Problems, 1960 (scalar case).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.federated.availability import AvailabilityProfile
from paceline.federated.client_memory import MemoryProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

_CLAIM_VARIANCE = 0.7**2  # of ln: a claim is off by a factor of 2, as often as not
_UNKNOWN_VARIANCE = 1.2**2  # of a client that claims nothing
_NOISE = 0.25**2  # of one measurement
_DRIFT = 0.05**2  # by which the variance grows from one measurement to the next
_JUMP = 3.0  # standard deviations that no noise explains
_FIRST_S = {"compute": 10e-3, "transfer": 3.2e-6}  # per sample, per byte: until anything is known
_KINDS = ("compute", "transfer")
_WAITING = "waiting"  # seconds per job; not known of clients that never waited


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What the server measured of one client's work.

    Attributes:
        samples: that it computed with.
        compute_s: from the end of its download to the begin of its upload.
        bytes: that were sent both ways.
        transfer_s: that both transfers took.
        waiting_s: before it began, for example in a queue.
        peak_bytes: of memory, as the client says; 0: it does not say.
    """

    samples: int
    compute_s: float
    bytes: int
    transfer_s: float
    waiting_s: float = 0.0
    peak_bytes: int = 0


@dataclass(slots=True)
class Profiler:
    """Estimates of all clients, by their numbers.

    Attributes:
        clients: how many there are.
        availability: whether they answer.
        memory: whether the training fits.
    """

    clients: int
    availability: AvailabilityProfile = field(init=False)
    memory: MemoryProfile = field(init=False)
    _mean: dict[str, np.ndarray] = field(default_factory=dict)
    _variance: dict[str, np.ndarray] = field(default_factory=dict)
    _measured: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for kind in (*_KINDS, _WAITING):
            self._mean[kind] = np.full(self.clients, np.nan)  # until a claim or measurement
            self._variance[kind] = np.full(self.clients, _UNKNOWN_VARIANCE)
        self._measured = np.zeros(self.clients, np.int64)
        self.availability = AvailabilityProfile(self.clients)
        self.memory = MemoryProfile(self.clients)

    def claim(self, client: int, seconds_per_sample: float, seconds_per_byte: float) -> None:
        """Take a client's word, as long as nothing is measured."""
        if self._measured[client]:
            return
        for kind, value in zip(_KINDS, (seconds_per_sample, seconds_per_byte), strict=True):
            if value > 0:
                self._mean[kind][client] = np.log(value)
                self._variance[kind][client] = _CLAIM_VARIANCE

    def observe(self, client: int, timing: Timing) -> None:
        """Learn from one client's work."""
        rates = timing.compute_s / max(1, timing.samples), timing.transfer_s / max(1, timing.bytes)
        for kind, rate in zip((*_KINDS, _WAITING), (*rates, timing.waiting_s), strict=True):
            if rate <= 0:
                continue
            mean, variance = self._mean[kind], self._variance[kind]
            before = mean[client] if np.isfinite(mean[client]) else self._typical(kind)
            miss = np.log(rate) - before
            spread = variance[client] + _DRIFT
            if miss**2 > _JUMP**2 * (spread + _NOISE):
                spread += miss**2
            gain = spread / (spread + _NOISE)
            mean[client] = before + gain * miss
            variance[client] = (1 - gain) * spread
        self._measured[client] += 1
        self.memory.observe(client, timing.peak_bytes)

    def expected_s(self, samples: np.ndarray | int, sent_bytes: int) -> np.ndarray:
        """Return the seconds that each client is expected to take; shape (clients,).

        Args:
            samples: that it computes with; one number, or shape (clients,).
            sent_bytes: both ways.
        """
        compute, transfer = (self._known(kind) for kind in _KINDS)
        total: np.ndarray = np.exp(compute) * samples + np.exp(transfer) * sent_bytes
        if np.isfinite(self._mean[_WAITING]).any():
            total = total + np.exp(self._known(_WAITING))
        return total

    def is_measured(self) -> np.ndarray:
        """Return which clients have been measured; bool, shape (clients,)."""
        return self._measured > 0

    def _known(self, kind: str) -> np.ndarray:
        mean = self._mean[kind]
        return np.where(np.isfinite(mean), mean, self._typical(kind))

    def _typical(self, kind: str) -> float:
        known = self._mean[kind][np.isfinite(self._mean[kind])]
        return float(known.mean()) if known.size else float(np.log(_FIRST_S.get(kind, 1.0)))

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {
            "mean": {kind: values.tolist() for kind, values in self._mean.items()},
            "variance": {kind: values.tolist() for kind, values in self._variance.items()},
            "measured": self._measured.tolist(),
            "availability": self.availability.state_dict(),
            "memory": self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        for kind in self._mean:
            self._mean[kind][:] = state["mean"][kind]
            self._variance[kind][:] = state["variance"][kind]
        self._measured[:] = state["measured"]
        self.availability.load_state_dict(state["availability"])
        self.memory.load_state_dict(state["memory"])


def jain(values: np.ndarray | Sequence[float]) -> float:
    """Return Jain's index: 1 if all values are equal, 1 / n if all but one are zero.

    Source: R. Jain et al., A Quantitative Measure of Fairness, DEC-TR-301, 1984.
    """
    numbers = np.asarray(values, np.float64)
    squares = float((numbers**2).sum())
    return float(numbers.sum()) ** 2 / (numbers.size * squares) if squares else 1.0
