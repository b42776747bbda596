"""Clients that do not exist: their devices, links, and when they are online.

    phones        speed in proportion to a benchmark score; log-normal links; sessions online
    silos         a facility's batch jobs: equal nodes, fast links, a wait in the queue each time

Sessions and gaps have log-normal lengths, and each client its own share of the time online. Links
and sessions are synthetic: no trace of them is at hand (see the guide).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.federated.clients import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONDITION = 0.2  # of ln(speed): phones of one model differ
_SESSION_S, _SESSION_SPREAD, _GAP_SPREAD = 3600.0, 0.8, 0.5
_PAST_S = 6 * 3600.0  # sessions begin before the simulation does


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOptions(Record):
    """What clients' devices are like.

    Attributes:
        kind: phones or silos.
        sample_ms: milliseconds that the median device computes on a sample.
        link_mbit_per_s: median downlink; the uplink has 0.2 to 0.7 of it.
        link_spread: standard deviation of its logarithm.
        jitter: standard deviation of ln(seconds) from round to round.
        drop_share: of the work that is lost.
        online: whether clients come and go.
        queue_s: median wait of a silo's job in the queue.
    """

    kind: str = "phones"
    sample_ms: float = 10.0
    link_mbit_per_s: float = 5.0
    link_spread: float = 1.0
    jitter: float = 0.15
    drop_share: float = 0.02
    online: bool = True
    queue_s: float = 0.0


@dataclass(slots=True)
class World:
    """Devices, by client; arrays have the shape (clients,).

    Attributes:
        sample_s: seconds per sample.
        down_s, up_s: seconds per byte.
    """

    options: DeviceOptions
    sample_s: np.ndarray
    down_s: np.ndarray
    up_s: np.ndarray
    rng: np.random.Generator
    _toggles: list[tuple[float, int]] = field(default_factory=list)
    _is_online: np.ndarray = field(init=False)
    _share: np.ndarray = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        clients = self.sample_s.size
        self._is_online = np.ones(clients, bool)
        if self.options.online:
            self._share = 0.1 + 0.8 * self.rng.beta(2, 2, clients)
            self._is_online[:] = False
            self._make_sessions(clients)

    @classmethod
    def make(
        cls,
        clients: int,
        options: DeviceOptions,
        rng: np.random.Generator,
        scores: Sequence[float] = (),
    ) -> World:
        """Return a world.

        Args:
            clients: how many.
            options: of their devices.
            rng: that everything is drawn from.
            scores: of benchmarks of phones, in proportion to their speed; empty: log-normal.
        """
        if options.kind == "silos":
            speed = rng.lognormal(0, _CONDITION, clients)
        elif len(scores):
            known = np.asarray(scores, np.float64)
            speed = rng.choice(known, clients) / np.median(known)
            speed *= rng.lognormal(0, _CONDITION, clients)
        else:
            speed = rng.lognormal(0, 0.9, clients)
        down = options.link_mbit_per_s * 1e6 / 8 * rng.lognormal(0, options.link_spread, clients)
        up = down * rng.uniform(0.2, 0.7, clients)
        return cls(options, options.sample_ms / 1e3 / speed, 1 / down, 1 / up, rng)

    def order_by(self, share: np.ndarray) -> None:
        """Give the slowest devices and links to the clients with the largest `share`."""
        order = np.argsort(share, kind="stable")
        ratio = self.up_s / self.down_s
        self.sample_s[order] = np.sort(self.sample_s)
        self.down_s[order] = np.sort(self.down_s)
        self.up_s = self.down_s * ratio

    def timing(self, client: int, samples: int, model_bytes: int) -> tuple[Timing, float]:
        """Return what one client's work would be measured as, and its seconds in all."""
        jitter = self.options.jitter
        compute_s = self.sample_s[client] * samples * self.rng.lognormal(0, jitter)
        transfer_s = model_bytes * (self.down_s[client] + self.up_s[client])
        transfer_s *= self.rng.lognormal(0, jitter)
        queue_s = self.options.queue_s * self.rng.lognormal(0, 1) if self.options.queue_s else 0.0
        timing = Timing(
            samples=samples,
            compute_s=compute_s + queue_s,
            bytes=2 * model_bytes,
            transfer_s=transfer_s,
        )
        return timing, compute_s + queue_s + transfer_s

    def is_lost(self) -> bool:
        """Return whether the next work is lost."""
        return bool(self.rng.random() < self.options.drop_share)

    def online(self, now_s: float) -> np.ndarray:
        """Return who is online; bool, shape (clients,). Time never goes back."""
        if self.options.online:
            while self._toggles[self._next][0] <= now_s:
                _, client = self._toggles[self._next]
                self._is_online[client] ^= True
                self._next += 1
        return self._is_online

    def next_change_s(self) -> float:
        """Return when somebody comes or goes next; inf: never."""
        return self._toggles[self._next][0] if self.options.online else math.inf

    def _make_sessions(self, clients: int) -> None:
        """Fill the list of toggles, sorted; it is long enough for any budget that is allowed."""
        for client in range(clients):
            share = self._share[client]
            at_s = -float(self.rng.uniform(0, _PAST_S))
            while at_s < LONGEST_S:
                on_s = float(self.rng.lognormal(math.log(_SESSION_S), _SESSION_SPREAD))
                off_s = on_s * (1 - share) / share * float(self.rng.lognormal(0, _GAP_SPREAD))
                self._toggles += [(at_s, client), (at_s + on_s, client)]
                at_s += on_s + off_s
        self._toggles.sort()


LONGEST_S = 4 * 86400.0  # of a simulation of clients that come and go
