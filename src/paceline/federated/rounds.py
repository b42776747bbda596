"""Decides when clients start, when their updates make a new model, and who is given up.

One state machine for all kinds of rounds; events in, actions out:

    begin, arrived, lost, time passes --> advance --> StartClient, CancelClient, Aggregate

    synchronous     in_flight = 0: `cohort` clients start together; the model changes when they
                    have answered or their deadlines have passed
    over-selected   over_selection > 1: more start than are waited for; the rest is cancelled
    buffered        in_flight > 0: so many work at any time, and the model changes with each
                    `cohort` updates; late updates count less
    asynchronous    buffered with cohort = 1

Sources: J. Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022;
K. Bonawitz et al., Towards Federated Learning at Scale, MLSys 2019 (over-selection).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import UsageError
from paceline.federated.aggregation.weights import staleness_weights
from paceline.federated.clients import Profiler
from paceline.federated.selection.view import ClientsView, Selector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.federated.clients import Timing
    from paceline.federated.updates import ModelUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOptions:
    """How rounds go.

    Attributes:
        cohort: updates that make a new model.
        in_flight: clients that work at any time; 0: rounds are synchronous.
        over_selection: clients that a synchronous round starts, over `cohort`.
        staleness_power: p of the weight (1 + versions missed)^-p of a late update.
        deadline_factor: a client is given up after so many times its expected seconds.
        least_deadline_s: but not before.
    """

    cohort: int = 10
    in_flight: int = 15
    over_selection: float = 1.0
    staleness_power: float = 0.5
    deadline_factor: float = 4.0
    least_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        if self.cohort < 1 or self.in_flight < 0 or self.over_selection < 1:
            raise UsageError(
                f"rounds of {self.cohort} updates, {self.in_flight} clients in flight and "
                f"{self.over_selection} times as many started are not possible",
                where="rounds",
                fix="Give a cohort of 1 or more, 0 or more in flight, an over-selection from 1 on",
            )


class StartClient(NamedTuple):
    """Send a client the model of a version."""

    client: int
    version: int
    deadline_s: float


class CancelClient(NamedTuple):
    """Tell a client to stop: nobody waits for it.

    Attributes:
        overdue_s: seconds that it was given, if it has not answered within them; None: others were
            faster.
    """

    client: int
    overdue_s: float | None = None


class Aggregate(NamedTuple):
    """Make the next model of these updates, with weights that need not add up to 1.

    `spent_s` has the seconds that each client worked.
    """

    updates: tuple[ModelUpdate, ...]
    clients: tuple[int, ...]
    staleness: tuple[float, ...]
    spent_s: tuple[float, ...]


Action = StartClient | CancelClient | Aggregate


class _Working(NamedTuple):
    """A client that was asked."""

    version: int
    started_s: float
    deadline_s: float


class _Arrived(NamedTuple):
    """An update that waits for the next model."""

    client: int
    update: ModelUpdate
    spent_s: float


@dataclass(slots=True)
class RoundController:
    """Runs rounds; keeps what is counted of each client.

    Args:
        options: of the rounds.
        selector: chooses whom to ask.
        profiler: knows how long clients take.
        samples: that each client says it trains on per round; shape (clients,).
        sent_bytes: of a model, both ways.

    Attributes:
        version: of the current model, from 0.
        spent_s, wasted_s: that all clients have worked, and of it what was thrown away.
        returned: updates that were used, by client.
        failed: how often each client has not answered within its deadline, or sent what could not
            be used.
    """

    options: RoundOptions
    selector: Selector
    profiler: Profiler
    samples: np.ndarray
    sent_bytes: int
    version: int = 0
    wasted_s: float = 0.0
    selected: np.ndarray = field(init=False)
    returned: np.ndarray = field(init=False)
    failed: np.ndarray = field(init=False)
    _spent_s: np.ndarray = field(init=False)
    _loss: np.ndarray = field(init=False)
    _surprise: np.ndarray = field(init=False)
    _last_round: np.ndarray = field(init=False)
    _working: dict[int, _Working] = field(default_factory=dict)
    _arrived: list[_Arrived] = field(default_factory=list)

    def __post_init__(self) -> None:
        clients = self.profiler.clients
        self.selected, self.returned = np.zeros(clients, np.int64), np.zeros(clients, np.int64)
        self.failed = np.zeros(clients, np.int64)
        self._spent_s = np.zeros(clients)
        self._loss, self._surprise = np.full(clients, np.nan), np.full(clients, np.nan)
        self._last_round = np.full(clients, -1)

    @property
    def spent_s(self) -> float:
        """Seconds that all clients have worked."""
        return float(self._spent_s.sum())

    @property
    def spent_by_client_s(self) -> np.ndarray:
        """Seconds that each client has worked; shape (clients,)."""
        return self._spent_s.copy()

    @property
    def typical_loss(self) -> float:
        """Median of the losses that clients reported last; nan before any."""
        known = self._loss[np.isfinite(self._loss)]
        return float(np.median(known)) if known.size else float("nan")

    @property
    def working(self) -> frozenset[int]:
        """Clients that were asked and have not answered."""
        return frozenset(self._working)

    def version_of(self, client: int) -> int | None:
        """Return the version that a client works with; None: it was not asked."""
        work = self._working.get(client)
        return None if work is None else work.version

    @property
    def next_deadline_s(self) -> float | None:
        """The time at which `advance` must be called although nothing happened."""
        return min((work.deadline_s for work in self._working.values()), default=None)

    def arrived(self, now_s: float, client: int, update: ModelUpdate, timing: Timing) -> bool:
        """Take a client's update; return whether it is used.

        An update of a client that was given up or cancelled comes too late.
        """
        self.profiler.observe(client, timing)
        if client not in self._working or self._working[client].version != update.version:
            return False
        self._observe(now_s, client, answered=True)
        seconds = self._end(now_s, client)
        self._loss[client] = update.loss
        self._arrived.append(_Arrived(client, update, seconds))
        return True

    def lost(self, now_s: float, client: int, *, left: bool = False) -> None:
        """Note that a client's work was lost.

        Args:
            now_s: seconds of a clock that never goes back.
            client: its number.
            left: whether the client is gone too.
        """
        if client not in self._working:
            return
        if left:
            self._observe(now_s, client, answered=False)
        self._waste(now_s, client)

    def refused(self, now_s: float, client: int) -> None:
        """Note that a client that works has sent what cannot be used."""
        self.failed[client] += 1
        self.lost(now_s, client)

    def lacked_memory(self, now_s: float, client: int) -> None:
        """Note that a client that works has too little memory for the training."""
        self.profiler.memory.refused(now_s, client)
        self.lost(now_s, client)

    def discarded(self, client: int, spent_s: float) -> None:
        """Note that an update of an `Aggregate` was not used after all."""
        self.returned[client] -= 1
        self.failed[client] += 1
        self.wasted_s += spent_s

    def surprised(self, client: int, distance: float) -> None:
        """Note how far a client's update was from what was expected of it."""
        self._surprise[client] = distance

    def advance(
        self, now_s: float, is_online: np.ndarray, accuracy: Sequence[float] = ()
    ) -> list[Action]:
        """Return what is to be done now; call again after each event and at `next_deadline_s`.

        Args:
            now_s: seconds of a clock that never goes back.
            is_online: bool, shape (clients,).
            accuracy: of the global model so far, oldest first.
        """
        actions: list[Action] = []
        overdue = {c: work for c, work in self._working.items() if work.deadline_s <= now_s}
        for client, work in overdue.items():
            self._observe(now_s, client, answered=False)
            self._waste(now_s, client)
            self.failed[client] += 1
            actions.append(CancelClient(client, work.deadline_s - work.started_s))
        if self._is_complete():
            actions += self._aggregate(now_s)
        actions += self._start(now_s, is_online, accuracy)
        return actions

    def _is_complete(self) -> bool:
        if self.options.in_flight:
            return len(self._arrived) >= self.options.cohort
        is_over = not self._working
        return bool(self._arrived) and (is_over or len(self._arrived) >= self.options.cohort)

    def _aggregate(self, now_s: float) -> list[Action]:
        taken = self._arrived[: self.options.cohort]
        self._arrived = self._arrived[self.options.cohort :]
        clients = tuple(arrived.client for arrived in taken)
        for client in clients:
            self.returned[client] += 1
        updates = tuple(arrived.update for arrived in taken)
        spent_s = tuple(arrived.spent_s for arrived in taken)
        missed = [self.version - update.version for update in updates]
        staleness = staleness_weights(missed, power=self.options.staleness_power)
        self.version += 1
        actions: list[Action] = [Aggregate(updates, clients, tuple(staleness.tolist()), spent_s)]
        if not self.options.in_flight:
            for client in list(self._working):
                self._waste(now_s, client)
                actions.append(CancelClient(client))
            self._arrived.clear()
        return actions

    def _start(
        self, now_s: float, is_online: np.ndarray, accuracy: Sequence[float]
    ) -> list[Action]:
        options = self.options
        if options.in_flight:
            wanted = options.in_flight - len(self._working)
        elif self._working or self._arrived:
            wanted = 0
        else:
            wanted = round(options.cohort * options.over_selection)
        if wanted <= 0:
            return []
        is_free = is_online & self.profiler.memory.fits(now_s)
        is_free[list(self._working)] = False
        if not options.in_flight and is_free.sum() < options.cohort:
            return []
        expected_s = self.profiler.expected_s(self.samples, self.sent_bytes)
        view = ClientsView(
            is_free=is_free,
            expected_s=expected_s,
            is_measured=self.profiler.is_measured(),
            # Who held a place for as long as several answers take has had as many turns.
            selected=self.selected + options.deadline_factor * self.failed,
            returned=self.returned,
            spent_s=self._spent_s,
            loss=self._loss,
            samples=self.samples,
            surprise=self._surprise,
            answers=self.profiler.availability.answers(now_s),
            last_round=self._last_round,
            round=self.version,
            accuracy=accuracy,
        )
        actions: list[Action] = []
        for number in self.selector.choose(view, wanted):
            client = int(number)
            allowed_s = max(options.least_deadline_s, options.deadline_factor * expected_s[client])
            self._working[client] = _Working(self.version, now_s, now_s + allowed_s)
            self.selected[client] += 1
            self._last_round[client] = self.version
            actions.append(StartClient(client, self.version, now_s + allowed_s))
        return actions

    def _observe(self, now_s: float, client: int, *, answered: bool) -> None:
        work = self._working[client]
        self.profiler.availability.observe(
            now_s, client, answered=answered, allowed_s=work.deadline_s - work.started_s
        )

    def _end(self, now_s: float, client: int) -> float:
        seconds = now_s - self._working.pop(client).started_s
        self._spent_s[client] += seconds
        return seconds

    def _waste(self, now_s: float, client: int) -> None:
        self.wasted_s += self._end(now_s, client)
