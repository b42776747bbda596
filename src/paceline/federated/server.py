"""The server of a federation: takes updates, makes models, says whom to ask next.

    arrived(update) -> refused, or kept -> advance -> new model, evaluated
                                          -> StartClient, CancelClient

It knows no clock and no network: the simulation and the Flower adapter drive the same object.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.federated.aggregation import weighted_sum
from paceline.federated.clusters import ClientClusters
from paceline.federated.monitor import Alarm, Evaluation, Monitor
from paceline.federated.rounds import Aggregate, CancelClient
from paceline.federated.update_memory import UpdateMemory
from paceline.federated.updates import Refusal, check_update, norm, norm_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.federated.clients import Timing
    from paceline.federated.pay import PaidRounds
    from paceline.federated.rounds import RoundController, StartClient
    from paceline.federated.strategies import Strategy
    from paceline.federated.updates import ModelUpdate

logger = logging.getLogger(__name__)

_MOST_FAIR = 4.0


class FederationServer:
    """Trains one model with the updates of clients.

    Args:
        controller: of the rounds.
        model: parameters to begin with; float32, shape (parameters,).
        weights: of the clients in the model; shape (clients,), any scale.
        strategy: whether each client's last update stands for it while it does not answer, and how
            losses count beside sizes.
        evaluate: returns the evaluation of a model, given seconds, version and parameters.
        evaluate_every: new models.
        pay: scores updates and pays for them; None: nobody is paid, and all updates count.
        name_of: returns a client's id, by its number.

    Attributes:
        controller: of the rounds.
        monitor: of the model.
        clusters: of clients, by their updates.
        refused: updates that were not used or did not come, in the order of time.
        alarms: of the monitor, the first of each kind.
    """

    def __init__(
        self,
        controller: RoundController,
        model: np.ndarray,
        weights: np.ndarray,
        *,
        strategy: Strategy,
        evaluate: Callable[[float, int, np.ndarray], Evaluation],
        evaluate_every: int = 5,
        pay: PaidRounds | None = None,
        name_of: Callable[[int], str] = str,
    ) -> None:
        self._name_of = name_of
        self.controller, self._pay = controller, pay
        self._weights, self._strategy = weights, strategy
        self._evaluate, self._evaluate_every = evaluate, evaluate_every
        self.monitor = Monitor()
        self.clusters = ClientClusters(weights.size, model.size)
        self.refused: list[Refusal] = []
        self.alarms: dict[str, Alarm] = {}
        self._unpaid: dict[str, Refusal] = {}  # since the last model
        self._norms: dict[int, float] = {}  # of each client's last update that was used
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
            self.refuse(now_s, client, "values", problem.why)
            return
        self.controller.arrived(now_s, client, update, timing)

    def lost(
        self, now_s: float, client: int, reason: str = "its work was lost", *, left: bool = False
    ) -> None:
        """Note that a client's work was lost, and whether the client has left."""
        self._note(client, "lost", reason)
        self.controller.lost(now_s, client, left=left)

    def lacked_memory(self, now_s: float, client: int, reason: str) -> None:
        """Note that a client that works has too little memory for the training."""
        self._note(client, "memory", reason)
        self.controller.lacked_memory(now_s, client)

    def refuse(self, now_s: float, client: int, check: str, reason: str) -> None:
        """Refuse what a client that works has sent; nobody waits for it any more.

        Args:
            now_s: seconds of a clock that never goes back.
            client: its number.
            check: that it failed.
            reason: a clause with the value and the limit.
        """
        self._note(client, check, reason)
        self.controller.refused(now_s, client)

    def _note(self, client: int, check: str, reason: str) -> None:
        refusal = Refusal(client=self._name_of(client), check=check, reason=reason)
        self.refused.append(refusal)
        self._unpaid[refusal.client] = refusal
        logger.info("client %s is unpaid (%s): %s", refusal.client, check, reason)

    def advance(
        self, now_s: float, is_online: np.ndarray, rounds: int
    ) -> list[StartClient | CancelClient]:
        """Make new models as far as there are updates; return what to tell clients.

        Args:
            now_s: seconds of a clock that never goes back.
            is_online: bool, shape (clients,).
            rounds: new models of the whole training; more than these are not made.
        """
        found: list[StartClient | CancelClient] = []
        has_changed = True
        while has_changed:
            has_changed = False
            for action in self.controller.advance(now_s, is_online, self.monitor.smoothed):
                if isinstance(action, Aggregate):
                    self._aggregate(now_s, action)
                    has_changed = self.version < rounds
                    continue
                if isinstance(action, CancelClient) and action.overdue_s is not None:
                    reason = f"no answer within {action.overdue_s:.0f} s"
                    self._note(action.client, "deadline", reason)
                found.append(action)
        in_use = {*map(self.controller.version_of, self.controller.working), self.version}
        self._models = {v: model for v, model in self._models.items() if v in in_use}
        return found

    def _aggregate(self, now_s: float, action: Aggregate) -> None:
        """Make the next model; the controller counts it already."""
        action = self._without_giants(action)
        for client, update in zip(action.clients, action.updates, strict=True):
            self.clusters.note(client, update.delta, update.accuracy)
        fair = self._fair_factors(action)
        weights = [
            float(self._weights[client]) * late * factor
            for client, late, factor in zip(action.clients, action.staleness, fair, strict=True)
        ]
        before = self._models[self.version - 1]
        deltas = [update.delta for update in action.updates]
        if self._pay is not None:
            judged = self._pay.judge(now_s, before, action.updates, self._unpaid)
            self.refused += judged.refusals
            deltas = judged.deltas
            weights = [w * factor for w, factor in zip(weights, judged.factors, strict=True)]
        self._unpaid = {}
        self._models[self.version] = before + self._combined(action.clients, deltas, weights, fair)
        if self.version % self._evaluate_every == 0:
            evaluation = self._evaluate(now_s, self.version, self.model)
            alarm = self.monitor.add(evaluation._replace(by_cluster=self.clusters.evaluate()))
            if alarm is not None and self.alarms.setdefault(alarm.kind, alarm) is alarm:
                logger.warning("model %d, after %.0f s: %s", self.version, now_s, alarm.text)

    def _without_giants(self, action: Aggregate) -> Aggregate:
        """Return the action without updates whose norms are far above those of other clients."""
        norms = [norm(update.delta) for update in action.updates]
        kept = []
        for index, client in enumerate(action.clients):
            others = {**self._norms, **dict(zip(action.clients, norms, strict=True))}
            others.pop(client)
            limit = norm_limit(list(others.values()))
            if norms[index] <= limit:
                kept.append(index)
                continue
            self._note(client, "norm", f"norm {norms[index]:.3g}, and {limit:.3g} is the limit")
            self.controller.discarded(client, action.spent_s[index])
        self._norms.update({action.clients[index]: norms[index] for index in kept})
        return Aggregate(
            tuple(action.updates[index] for index in kept),
            tuple(action.clients[index] for index in kept),
            tuple(action.staleness[index] for index in kept),
            tuple(action.spent_s[index] for index in kept),
        )

    def _fair_factors(self, action: Aggregate) -> list[float]:
        """Return by how much the losses of the clients raise the weights of their updates.

        A weight is size x (loss / median loss)^p, so that the model turns to those for whom it is
        poor. Losses are what clients say: the factor stays within 1/4 and 4.
        Source: T. Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (q-FFL).
        """
        typical, power = self.controller.typical_loss, self._strategy.loss_power
        if not power or not typical > 0:
            return [1.0] * len(action.clients)
        ratios = np.array([update.loss for update in action.updates]) / typical
        known = np.where(np.isfinite(ratios) & (ratios > 0), ratios, 1.0)
        factors: list[float] = np.clip(known**power, 1 / _MOST_FAIR, _MOST_FAIR).tolist()
        return factors

    def _combined(
        self,
        clients: Sequence[int],
        deltas: Sequence[np.ndarray],
        weights: Sequence[float],
        fair: Sequence[float],
    ) -> np.ndarray:
        """Return how the model changes; not at all where no update has a weight."""
        used = [n for n, weight in enumerate(weights) if weight > 0]
        clients, deltas = [clients[n] for n in used], [deltas[n] for n in used]
        weights, fair = [weights[n] for n in used], [fair[n] for n in used]
        if not used:
            change = np.zeros_like(self._models[self.version - 1])
        elif self._strategy.remembers:
            for client, delta in zip(clients, deltas, strict=True):
                self.controller.surprised(client, self._memory.distance(client, delta))
            change = self._memory.combine(clients, deltas, weights, fair)
        else:
            change = weighted_sum(deltas, np.asarray(weights) / sum(weights))
        if self._pay is not None:
            self._pay.applied(change)
        return change
