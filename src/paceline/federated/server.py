"""The server of a federation: takes updates, makes models, says whom to ask next.

    arrived(update) -> refused, or kept -> advance -> new model, evaluated
                                          -> StartClient, CancelClient

It knows no clock and no network: the simulation and the Flower adapter drive the same object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.federated.aggregation import weighted_sum
from paceline.federated.monitor import Evaluation, Monitor
from paceline.federated.rounds import Aggregate
from paceline.federated.update_memory import UpdateMemory
from paceline.federated.updates import Refusal, check_update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.federated.clients import Timing
    from paceline.federated.pay import PaidRounds
    from paceline.federated.rounds import CancelClient, RoundController, StartClient
    from paceline.federated.updates import ModelUpdate


class FederationServer:
    """Trains one model with the updates of clients.

    Args:
        controller: of the rounds.
        model: parameters to begin with; float32, shape (parameters,).
        weights: of the clients in the model; shape (clients,), any scale.
        remembers: whether each client's last update stands for it while it does not answer.
        evaluate: returns the evaluation of a model, given seconds, version and parameters.
        evaluate_every: new models.
        pay: scores updates and pays for them; None: nobody is paid, and all updates count.

    Attributes:
        controller: of the rounds.
        monitor: of the model.
        refused: updates that were not used.
        alarms: of the monitor, each kind once.
    """

    def __init__(
        self,
        controller: RoundController,
        model: np.ndarray,
        weights: np.ndarray,
        *,
        remembers: bool,
        evaluate: Callable[[float, int, np.ndarray], Evaluation],
        evaluate_every: int = 5,
        pay: PaidRounds | None = None,
    ) -> None:
        self.controller, self._pay = controller, pay
        self._weights, self._remembers = weights, remembers
        self._evaluate, self._evaluate_every = evaluate, evaluate_every
        self.monitor = Monitor()
        self.refused: list[Refusal] = []
        self.alarms: dict[str, None] = {}
        self._memory = UpdateMemory(weights, model.size)
        self._models = {0: model}  # by version, as long as a client may work with it

    @property
    def version(self) -> int:
        """Of the current model."""
        return self.controller.version

    @property
    def model(self) -> np.ndarray:
        """The current model; float32, shape (parameters,)."""
        return self._models[self.version]

    def waits_for(self, client: int, version: int) -> bool:
        """Return whether an update of a client's would be used."""
        return self.controller.version_of(client) == version

    def model_of(self, client: int) -> np.ndarray:
        """Return the model that a client works with.

        Raises:
            KeyError: it was not asked.
        """
        version = self.controller.version_of(client)
        if version is None:
            raise KeyError(client)
        return self._models[version]

    def arrived(self, now_s: float, client: int, update: ModelUpdate, timing: Timing) -> None:
        """Take an update; one that cannot be used, or that nobody waits for, changes nothing."""
        try:
            check_update(update, self.model.size)
        except UsageError as problem:
            self.refused.append(Refusal(client=update.client, check="values", reason=problem.why))
            self.lost(now_s, client)
            return
        self.controller.arrived(now_s, client, update, timing)

    def lost(self, now_s: float, client: int) -> None:
        """Note that a client has failed."""
        self.controller.lost(now_s, client)

    def advance(self, now_s: float, is_online: np.ndarray) -> list[StartClient | CancelClient]:
        """Make new models as far as there are updates; return what to tell clients.

        Args:
            now_s: seconds of a clock that never goes back.
            is_online: bool, shape (clients,).
        """
        found: list[StartClient | CancelClient] = []
        has_changed = True
        while has_changed:
            has_changed = False
            for action in self.controller.advance(now_s, is_online, self.monitor.smoothed):
                if isinstance(action, Aggregate):
                    self._aggregate(now_s, action)
                    has_changed = True
                else:
                    found.append(action)
        in_use = {*map(self.controller.version_of, self.controller.working), self.version}
        self._models = {v: model for v, model in self._models.items() if v in in_use}
        return found

    def _aggregate(self, now_s: float, action: Aggregate) -> None:
        """Make the next model; the controller counts it already."""
        weights = [
            float(self._weights[client]) * late
            for client, late in zip(action.clients, action.staleness, strict=True)
        ]
        before = self._models[self.version - 1]
        deltas = [update.delta for update in action.updates]
        if self._pay is not None:
            deltas, factors = self._pay.judge(now_s, before, action.updates)
            weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        self._models[self.version] = before + self._combined(action.clients, deltas, weights)
        if self.version % self._evaluate_every == 0:
            alarm = self.monitor.add(self._evaluate(now_s, self.version, self.model))
            if alarm:
                self.alarms.setdefault(alarm.partition(":")[0])

    def _combined(
        self, clients: Sequence[int], deltas: Sequence[np.ndarray], weights: Sequence[float]
    ) -> np.ndarray:
        """Return how the model changes; not at all where no update has a weight."""
        used = [n for n, weight in enumerate(weights) if weight > 0]
        clients, deltas = [clients[n] for n in used], [deltas[n] for n in used]
        weights = [weights[n] for n in used]
        if not used:
            change = np.zeros_like(self._models[self.version - 1])
        elif self._remembers:
            for client, delta in zip(clients, deltas, strict=True):
                self.controller.surprised(client, self._memory.distance(client, delta))
            change = self._memory.combine(clients, deltas, weights)
        else:
            change = weighted_sum(deltas, np.asarray(weights) / sum(weights))
        if self._pay is not None:
            self._pay.applied(change)
        return change
