"""Runs a federation of simulated clients on a virtual clock; the training itself is real.

    heap of events: a client's work is done or lost; a deadline; somebody comes online
      -> FederationServer.advance -> StartClient: draw its seconds, push the end of its work

A client's training is computed when its update arrives, with the model that it was sent.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.randomness import make_generator
from paceline.core.record import Record
from paceline.federated.clients import Profiler, Timing, jain
from paceline.federated.monitor import Evaluation, Monitor, evaluate
from paceline.federated.rounds import RoundController, StartClient
from paceline.federated.server import FederationServer
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.faults import FaultOptions
from paceline.federated.simulate.world import LONGEST_S
from paceline.federated.updates import ModelUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.federated.pay import PaidRounds
    from paceline.federated.simulate.images import ImageData
    from paceline.federated.simulate.world import SimulatedClients
    from paceline.federated.strategies import Strategy
    from paceline.federated.updates import Refusal

_MOST_TESTED = 100  # samples of a client, on which it tests the model that it was sent


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientWork(Record):
    """What a client does when it is asked.

    Attributes:
        batch: samples of a step.
        epochs: passes over its samples.
        learning_rate: of SGD.
        model_bytes: of the model on the wire, one way.
        memory_mib: that training takes; where devices have a `memory_mib`.
    """

    batch: int = 20
    epochs: float = 1.0
    learning_rate: float = 0.02
    model_bytes: int = 2_000_000
    memory_mib: float = 256.0

    def steps(self, samples: int) -> int:
        """Return the steps of a client with so many samples."""
        return max(1, round(self.epochs * samples / self.batch))


class FederationOutcome(NamedTuple):
    """What a simulation came to.

    Attributes:
        monitor: evaluations of the model.
        seconds, rounds: that were simulated.
        returned: updates of each client that were used.
        came_online: whether each client was ever online.
        cluster_of: the cluster of each client in the end; -1: none.
        spent_s: seconds that each client worked.
        wasted_s: of all clients, that was thrown away.
        sent_bytes: both ways, of all clients.
        alarms: of the monitor, the first of each kind.
        refused: updates that were not used or did not come, in the order of time.
    """

    monitor: Monitor
    seconds: float
    rounds: int
    returned: np.ndarray
    came_online: np.ndarray
    cluster_of: np.ndarray
    spent_s: np.ndarray
    wasted_s: float
    sent_bytes: int
    alarms: tuple[str, ...]
    refused: tuple[Refusal, ...]

    @property
    def fairness(self) -> float:
        """Jain's index of the used updates."""
        return jain(self.returned)

    @property
    def work_fairness(self) -> float:
        """Jain's index of the seconds that clients worked."""
        return jain(self.spent_s)

    @property
    def never_used(self) -> float:
        """Share of clients without a used update."""
        return float((self.returned == 0).mean())

    @property
    def never_online(self) -> float:
        """Share of clients that nobody could have used."""
        return float((~self.came_online).mean())

    @property
    def waste(self) -> float:
        """Share of the clients' seconds that was thrown away."""
        total_s = float(self.spent_s.sum())
        return self.wasted_s / total_s if total_s else 0.0


class _Done(NamedTuple):
    """The end of one client's work."""

    client: int
    version: int
    timing: Timing | None  # None: it was lost
    lacks_memory: str = ""  # a clause with the numbers


class FederationSimulation:
    """A federation of simulated clients.

    Args:
        data: of all clients, and to evaluate with.
        parts: samples of each client.
        world: their devices.
        strategy: how the federation is run.
        work: of a client.
        seed: of selection, training and the first model.
        faults: clients that fail.
        pay: pays clients; None: nobody is paid.
    """

    def __init__(
        self,
        data: ImageData,
        parts: Sequence[np.ndarray],
        world: SimulatedClients,
        strategy: Strategy,
        *,
        work: ClientWork | None = None,
        seed: int = 0,
        faults: FaultOptions | None = None,
        pay: PaidRounds | None = None,
    ) -> None:
        self._faults = faults or FaultOptions()
        self._data, self._parts, self._world = data, parts, world
        self._work = work or ClientWork()
        self._classifier = Classifier(inputs=data.images.shape[1])
        self._rng = make_generator(seed, "training")
        self._sizes = np.array([part.size for part in parts])
        self._steps = np.array([self._work.steps(size) for size in self._sizes])
        profiler = Profiler(len(parts))
        for client in range(len(parts)):
            link_s = (world.down_s[client] + world.up_s[client]) / 2
            profiler.claim(client, world.sample_s[client], link_s)
            if np.isfinite(world.memory_bytes[client]):
                profiler.memory.claim(client, world.memory_bytes[client])
        controller = RoundController(
            strategy.rounds,
            strategy.make_selector(make_generator(seed, "selection")),
            profiler,
            self._steps * self._work.batch,
            2 * self._work.model_bytes,
        )
        self._server = FederationServer(
            controller,
            self._classifier.initial(make_generator(seed, "model")),
            self._sizes,
            strategy=strategy,
            evaluate=self._evaluate,
            pay=pay,
        )
        self._is_buffered = strategy.rounds.in_flight > 0
        self._most_working = max(1, strategy.rounds.in_flight)
        self._events: list[tuple[float, int, _Done]] = []
        self._order = itertools.count()
        self._sent_bytes = 0
        self._came_online = np.zeros(len(parts), bool)

    def expected_s(self) -> np.ndarray:
        """Return the seconds of each client's work without jitter; shape (clients,)."""
        world, samples = self._world, self._steps * self._work.batch
        transfer: np.ndarray = self._work.model_bytes * (world.down_s + world.up_s)
        total: np.ndarray = world.sample_s * samples + transfer
        return total + world.queue_s if world.queue_s.size else total

    def run(self, budget_s: float, rounds: int, *, target: float = math.inf) -> FederationOutcome:
        """Run until a budget is spent.

        Args:
            budget_s: simulated seconds.
            rounds: new models.
            target: smoothed accuracy at which to end.

        Raises:
            UsageError: the budget is longer than a simulation can be.
        """
        if budget_s > LONGEST_S:
            raise UsageError(
                f"a budget of {budget_s:g} s is longer than a simulation can be",
                where="federation",
                fix=f"Give at most {LONGEST_S:g} s",
            )
        now_s, server = 0.0, self._server
        while now_s <= budget_s and server.version < rounds:
            online = self._world.online(now_s)
            self._came_online |= online
            for action in server.advance(now_s, online, rounds):
                if isinstance(action, StartClient):
                    self._start(now_s, action)
            if server.monitor.evaluations and server.monitor.final >= target:
                break
            now_s = self._wait(now_s)
        return FederationOutcome(
            monitor=server.monitor,
            seconds=min(now_s, budget_s),
            rounds=server.version,
            returned=server.controller.returned.copy(),
            came_online=self._came_online,
            cluster_of=server.clusters.cluster_of,
            spent_s=server.controller.spent_by_client_s,
            wasted_s=server.controller.wasted_s,
            sent_bytes=self._sent_bytes,
            alarms=tuple(alarm.text for alarm in server.alarms.values()),
            refused=tuple(server.refused),
        )

    def _start(self, now_s: float, action: StartClient) -> None:
        """Draw how long a client takes, and whether its work is lost."""
        samples = int(self._steps[action.client]) * self._work.batch
        timing, seconds = self._world.timing(action.client, samples, self._work.model_bytes, now_s)
        lost = self._world.is_lost()
        self._sent_bytes += self._work.model_bytes
        done = _Done(action.client, action.version, None if lost else timing)
        needed, free = self._work.memory_mib, self._world.free_bytes(action.client, now_s) / 2**20
        if free < needed:
            seconds = timing.waiting_s + timing.transfer_s / 2  # it finds out after the download
            reason = f"{free:.0f} MiB of memory are free, and training takes {needed:.0f} MiB"
            done = done._replace(lacks_memory=reason)
        elif math.isfinite(free) and done.timing is not None:
            done = done._replace(timing=replace(timing, peak_bytes=round(needed * 2**20)))
        if action.client in self._faults.silent or (
            self._world.options.leaving_loses
            and not self._world.stays(action.client, now_s, seconds)
        ):
            return
        heapq.heappush(self._events, (now_s + seconds, next(self._order), done))

    def _wait(self, now_s: float) -> float:
        """Move on to the next thing that happens, take it, and return its time."""
        controller = self._server.controller
        deadline_s = controller.next_deadline_s
        done_s = self._events[0][0] if self._events else math.inf
        times = [done_s, math.inf if deadline_s is None else deadline_s]
        if len(controller.working) < (self._most_working if self._is_buffered else 1):
            times.append(self._world.next_change_s())
            times.append(controller.profiler.memory.next_try_s(now_s))
        next_s = min(times)
        if self._events and done_s == next_s:
            _, _, done = heapq.heappop(self._events)
            if self._server.waits_for(done.client, done.version):
                self._take(done_s, done)
        return max(now_s, next_s)

    def _take(self, now_s: float, done: _Done) -> None:
        if done.lacks_memory:
            self._server.lacked_memory(now_s, done.client, done.lacks_memory)
            return
        if done.timing is None:
            self._server.lost(now_s, done.client)
            return
        update = self._faults.spoil(done.client, self._trained(done.client, done.version))
        self._sent_bytes += self._work.model_bytes
        self._server.arrived(now_s, done.client, update, done.timing)

    def _trained(self, client: int, version: int) -> ModelUpdate:
        part, before = self._parts[client], self._server.model_of(client)
        few = part[:_MOST_TESTED]
        predicted = self._classifier.probabilities(before, self._data.images[few]).argmax(1)
        steps = int(self._steps[client])
        after, loss = self._classifier.train(
            before,
            self._data.images[part],
            self._data.labels[part],
            batch=self._work.batch,
            steps=steps,
            learning_rate=self._work.learning_rate,
            rng=self._rng,
        )
        return ModelUpdate(
            client=str(client),
            version=version,
            delta=after - before,
            samples=int(self._sizes[client]),
            steps=steps,
            loss=loss,
            accuracy=float((predicted == self._data.labels[few]).mean()),
        )

    def _evaluate(self, now_s: float, version: int, model: np.ndarray) -> Evaluation:
        predicted = self._classifier.probabilities(model, self._data.test_images).argmax(1)
        return evaluate(now_s, version, predicted, self._data.test_labels)
