"""Clients that do not exist: their devices, links, and when they are online.

    phones        speed in proportion to a benchmark score; log-normal links; sessions online
    silos         a facility's batch jobs: equal nodes, always there, a wait in the queue each time

A device may be busy with other work now and then, and is slower meanwhile. Sessions and gaps have
log-normal lengths, and each client its own share of the time online. Links and sessions are
synthetic: no trace of them is at hand (see the guide).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.record import Record, nearest
from paceline.federated.clients import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONDITION = 0.2  # of ln(speed): phones of one model differ
_SESSION_S, _SESSION_SPREAD, _GAP_SPREAD = 3600.0, 0.8, 0.5
_BUSY_S, _BUSY_SPREAD = 300.0, 0.5  # of other work on a device
_BUSY_MEMORY = 0.5  # of its memory that other work leaves
_QUEUE_SPREAD = 0.5  # of ln(wait) from job to job
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
        online: whether phones come and go; silos do not.
        queue_s: median wait of a silo's job in its queue.
        queue_spread: standard deviation of the logarithms of silos' median waits.
        busy_share: of the time in which other work runs on a device.
        busy_factor: times that its own work takes meanwhile.
        memory_mib: that the median device has to spare; half of it while other work runs; 0: the
            memory of all devices suffices.
        memory_spread: standard deviation of its logarithm.
        leaving_loses: whether a client that goes offline while it works is not heard of again.
    """

    kind: str = "phones"
    sample_ms: float = 10.0
    link_mbit_per_s: float = 5.0
    link_spread: float = 1.0
    jitter: float = 0.15
    drop_share: float = 0.02
    online: bool = True
    queue_s: float = 0.0
    queue_spread: float = 1.0
    busy_share: float = 0.0
    busy_factor: float = 3.0
    memory_mib: float = 0.0
    memory_spread: float = 0.7
    leaving_loses: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"there are no devices of kind {self.kind!r}",
                where="devices",
                fix=nearest(self.kind, KINDS),
            )
        if not 0 <= self.drop_share <= 1 or not 0 <= self.busy_share < 1:
            raise ConfigError(
                f"drop_share {self.drop_share} and busy_share {self.busy_share} are not possible",
                where="devices",
                fix="Give a drop_share from 0 to 1, a busy_share from 0 to below 1",
            )
        least = {"sample_ms": 1e-9, "link_mbit_per_s": 1e-9, "busy_factor": 1.0}
        least |= dict.fromkeys(("queue_s", "memory_mib", "memory_spread"), 0.0)
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}", where="devices", fix=f"At least {value:g}"
                )


@dataclass(slots=True)
class SimulatedClients:
    """Devices, by client; arrays have the shape (clients,).

    Attributes:
        sample_s: seconds per sample.
        down_s, up_s: seconds per byte.
        queue_s: median wait of a job; empty: nobody waits.
        memory_bytes: to spare while no other work runs; inf, until it is drawn: it suffices.
    """

    options: DeviceOptions
    sample_s: np.ndarray
    down_s: np.ndarray
    up_s: np.ndarray
    rng: np.random.Generator
    queue_s: np.ndarray = field(init=False)
    memory_bytes: np.ndarray = field(init=False)
    _toggles: list[tuple[float, int]] = field(default_factory=list)
    _is_online: np.ndarray = field(init=False)
    _share: np.ndarray = field(init=False)
    _changes: list[np.ndarray] = field(default_factory=list)  # times of comings and goings
    _next: int = 0
    _busy: list[np.ndarray] = field(
        default_factory=list
    )  # begins and ends of other work, by client

    def __post_init__(self) -> None:
        clients = self.sample_s.size
        self._is_online = np.ones(clients, bool)
        if self.comes_and_goes:
            self._share = 0.1 + 0.8 * self.rng.beta(2, 2, clients)
            self._is_online[:] = False
            self._make_sessions(clients)
        self.memory_bytes = np.full(clients, math.inf)
        self.queue_s = np.zeros(0)
        if self.options.kind == "silos" and self.options.queue_s:
            spread = self.rng.lognormal(0, self.options.queue_spread, clients)
            self.queue_s = self.options.queue_s * spread
        if self.options.busy_share:
            self._busy = [self._make_busy_times() for _ in range(clients)]

    @property
    def comes_and_goes(self) -> bool:
        """Whether clients are offline now and then."""
        return self.options.online and self.options.kind == "phones"

    @classmethod
    def make(
        cls,
        clients: int,
        options: DeviceOptions,
        rng: np.random.Generator,
        scores: Sequence[float] = (),
    ) -> SimulatedClients:
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

    def draw_memory(self, rng: np.random.Generator) -> None:
        """Draw the memory that each device has to spare, if that is limited."""
        if self.options.memory_mib:
            spread = rng.lognormal(0, self.options.memory_spread, self.memory_bytes.size)
            self.memory_bytes = self.options.memory_mib * 2**20 * spread

    def timing(
        self, client: int, samples: int, model_bytes: int, now_s: float = 0.0
    ) -> tuple[Timing, float]:
        """Return what one client's work would be measured as, and its seconds in all."""
        jitter = self.options.jitter
        compute_s = self.sample_s[client] * samples * self.rng.lognormal(0, jitter)
        transfer_s = model_bytes * (self.down_s[client] + self.up_s[client])
        transfer_s *= self.rng.lognormal(0, jitter)
        if self._busy and self.is_busy(client, now_s):
            compute_s *= self.options.busy_factor
        queue_s = 0.0
        if self.queue_s.size:
            queue_s = float(self.queue_s[client] * self.rng.lognormal(0, _QUEUE_SPREAD))
        timing = Timing(
            samples=samples,
            compute_s=compute_s,
            bytes=2 * model_bytes,
            transfer_s=transfer_s,
            waiting_s=queue_s,
        )
        return timing, compute_s + queue_s + transfer_s

    def is_busy(self, client: int, now_s: float) -> bool:
        """Return whether other work runs on a device when a client begins."""
        return bool(np.searchsorted(self._busy[client], now_s, side="right") % 2)

    def free_bytes(self, client: int, now_s: float) -> float:
        """Return the memory that a client has to spare when it begins."""
        is_busy = bool(self._busy) and self.is_busy(client, now_s)
        return float(self.memory_bytes[client]) * (_BUSY_MEMORY if is_busy else 1.0)

    def stays(self, client: int, now_s: float, seconds: float) -> bool:
        """Return whether a client that is online stays so for some seconds."""
        if not self.comes_and_goes:
            return True
        changes = self._changes[client]
        after = int(np.searchsorted(changes, now_s, side="right"))
        return after == changes.size or bool(now_s + seconds < changes[after])

    def is_lost(self) -> bool:
        """Return whether the next work is lost."""
        return bool(self.rng.random() < self.options.drop_share)

    def online(self, now_s: float) -> np.ndarray:
        """Return who is online; bool, shape (clients,). Time never goes back."""
        if self.comes_and_goes:
            while self._toggles[self._next][0] <= now_s:
                _, client = self._toggles[self._next]
                self._is_online[client] ^= True
                self._next += 1
        return self._is_online

    def next_change_s(self) -> float:
        """Return when somebody comes or goes next; inf: never."""
        return self._toggles[self._next][0] if self.comes_and_goes else math.inf

    def _make_busy_times(self) -> np.ndarray:
        """Return the ascending times at which other work begins and ends in turn."""
        share, times = self.options.busy_share, []
        at_s = -float(self.rng.uniform(0, _PAST_S))
        while at_s < LONGEST_S:
            busy_s = float(self.rng.lognormal(math.log(_BUSY_S), _BUSY_SPREAD))
            times += [at_s, at_s + busy_s]
            at_s += busy_s + busy_s * (1 - share) / share * float(
                self.rng.lognormal(-(_GAP_SPREAD**2) / 2, _GAP_SPREAD)
            )
        return np.array(times)

    def _make_sessions(self, clients: int) -> None:
        """Fill the list of toggles, sorted; it is long enough for any budget that is allowed."""
        for client in range(clients):
            share, begin = self._share[client], len(self._toggles)
            at_s = -float(self.rng.uniform(0, _PAST_S))
            while at_s < LONGEST_S:
                on_s = float(self.rng.lognormal(math.log(_SESSION_S), _SESSION_SPREAD))
                off_s = on_s * (1 - share) / share * float(self.rng.lognormal(0, _GAP_SPREAD))
                self._toggles += [(at_s, client), (at_s + on_s, client)]
                at_s += on_s + off_s
            self._changes.append(np.array([at_s for at_s, _ in self._toggles[begin:]]))
        self._toggles.sort()


KINDS = ("phones", "silos")
LONGEST_S = 4 * 86400.0  # of a simulation of clients that come and go
