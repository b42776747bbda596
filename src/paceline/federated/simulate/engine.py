"""Runs a federation of simulated clients on a virtual clock; the training itself is real.

heap of events: client done, client lost, deadline, somebody comes online
-> RoundController.advance -> Start      draw the client's seconds, push its end
-> Aggregate  add the updates, each trained at its arrival
to the model; evaluate it
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.randomness import make_generator
from paceline.core.record import Record
from paceline.federated.clients import Profiler, Timing, jain
from paceline.federated.monitor import Monitor, evaluate
from paceline.federated.rounds import Aggregate, RoundController, Start
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.world import LONGEST_S
from paceline.federated.update_memory import UpdateMemory
from paceline.federated.updates import ModelUpdate, check_update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.federated.rounds import Action
    from paceline.federated.simulate.images import ImageData
    from paceline.federated.simulate.world import World
    from paceline.federated.strategies import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Record):
    """What a client does when it is asked.

    Attributes:
        batch: samples of a step.
        epochs: passes over its samples.
        learning_rate: of SGD.
        model_bytes: of the model on the wire, one way.
    """

    batch: int = 20
    epochs: float = 1.0
    learning_rate: float = 0.02
    model_bytes: int = 2_000_000

    def steps(self, samples: int) -> int:
        """Return the steps of a client with so many samples."""
        return max(1, round(self.epochs * samples / self.batch))


class Outcome(NamedTuple):
    """What a simulation came to.

    Attributes:
        monitor: evaluations of the model.
        seconds, rounds: that were simulated.
        returned: updates of each client that were used.
        came_online: whether each client was ever online.
        spent_s, wasted_s: that all clients worked, and of it what was thrown away.
        sent_bytes: both ways, of all clients.
        alarms: of the monitor, each once.
    """

    monitor: Monitor
    seconds: float
    rounds: int
    returned: np.ndarray
    came_online: np.ndarray
    spent_s: float
    wasted_s: float
    sent_bytes: int
    alarms: tuple[str, ...]

    @property
    def fairness(self) -> float:
        """Jain's index of the used updates."""
        return jain(self.returned)

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
        return self.wasted_s / self.spent_s if self.spent_s else 0.0


class _Done(NamedTuple):
    """The end of one client's work."""

    client: int
    version: int
    timing: Timing | None  # None: it was lost


class Simulation:
    """A federation of simulated clients.

    Args:
        data: of all clients, and to evaluate with.
        parts: samples of each client.
        world: their devices.
        strategy: how the federation is run.
        work: of a client.
        seed: of selection, training and the first model.
        evaluate_every: new models.
    """

    def __init__(
        self,
        data: ImageData,
        parts: Sequence[np.ndarray],
        world: World,
        strategy: Strategy,
        *,
        work: Work | None = None,
        seed: int = 0,
        evaluate_every: int = 5,
    ) -> None:
        self._data, self._parts, self._world, self._strategy = data, parts, world, strategy
        self._work, self._evaluate_every = work or Work(), evaluate_every
        self._classifier = Classifier(inputs=data.images.shape[1])
        self._model = self._classifier.initial(make_generator(seed, "model"))
        self._rng = make_generator(seed, "training")
        sizes = np.array([part.size for part in parts])
        self._steps = np.array([self._work.steps(size) for size in sizes])
        samples = self._steps * self._work.batch
        profiler = Profiler(sizes.size)
        for client in range(sizes.size):
            link_s = (world.down_s[client] + world.up_s[client]) / 2
            profiler.claim(client, world.sample_s[client], link_s)
        self._controller = RoundController(
            strategy.rounds,
            strategy.make_selector(make_generator(seed, "selection")),
            profiler,
            samples,
            2 * self._work.model_bytes,
        )
        self._sizes = sizes
        self._memory = UpdateMemory(sizes.astype(float), self._classifier.parameters)
        self._models = {0: self._model}  # by version, as long as a client works with it
        self._events: list[tuple[float, int, _Done]] = []
        self._order = itertools.count()
        self._monitor = Monitor()
        self._alarms: dict[str, None] = {}
        self._sent_bytes = 0
        self._came_online = np.zeros(sizes.size, bool)

    def run(
        self,
        budget_s: float,
        rounds: int,
        *,
        target: float = math.inf,
        on_evaluation: Callable[[float, int, float], None] | None = None,
    ) -> Outcome:
        """Run until a budget is spent.

        Args:
            budget_s: simulated seconds.
            rounds: new models.
            target: smoothed accuracy at which to end.
            on_evaluation: called with seconds, round and accuracy.

        Raises:
            UsageError: the budget is longer than a simulation can be.
        """
        if budget_s > LONGEST_S:
            raise UsageError(
                f"a budget of {budget_s:g} s is longer than a simulation can be",
                where="federation",
                fix=f"Give at most {LONGEST_S:g} s",
            )
        now_s = 0.0
        while now_s <= budget_s and self._controller.version < rounds:
            online = self._world.online(now_s)
            self._came_online |= online
            actions = self._controller.advance(now_s, online, tuple(self._monitor.smoothed()))
            for action in actions:
                self._perform(now_s, action, on_evaluation)
            if self._monitor.evaluations and self._monitor.final >= target:
                break
            if any(isinstance(action, Aggregate) for action in actions):
                continue  # more updates may wait, and a new round begins at once
            now_s = self._wait(now_s)
        return Outcome(
            monitor=self._monitor,
            seconds=min(now_s, budget_s),
            rounds=self._controller.version,
            returned=self._controller.returned.copy(),
            came_online=self._came_online,
            spent_s=self._controller.spent_s,
            wasted_s=self._controller.wasted_s,
            sent_bytes=self._sent_bytes,
            alarms=tuple(self._alarms),
        )

    def _wait(self, now_s: float) -> float:
        """Move on to the next thing that happens, take it, and return its time."""
        deadline_s = self._controller.next_deadline_s
        done_s = self._events[0][0] if self._events else math.inf
        times = [done_s, math.inf if deadline_s is None else deadline_s]
        if len(self._controller.working) < max(1, self._strategy.rounds.in_flight):
            times.append(self._world.next_change_s())
        next_s = min(times)
        if done_s == next_s and self._events:
            _, _, done = heapq.heappop(self._events)
            self._take(done_s, done)
        return max(now_s, next_s)

    def _take(self, now_s: float, done: _Done) -> None:
        if done.timing is None:
            self._controller.lost(now_s, done.client)
            return
        if done.client not in self._controller.working or done.version not in self._models:
            return  # cancelled
        update = self._trained(done.client, done.version)
        self._sent_bytes += self._work.model_bytes
        self._controller.arrived(now_s, done.client, update, done.timing)

    def _trained(self, client: int, version: int) -> ModelUpdate:
        part, before = self._parts[client], self._models[version]
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
        )

    def _perform(
        self,
        now_s: float,
        action: Action,
        on_evaluation: Callable[[float, int, float], None] | None,
    ) -> None:
        if isinstance(action, Start):
            samples = int(self._steps[action.client]) * self._work.batch
            timing, seconds = self._world.timing(action.client, samples, self._work.model_bytes)
            lost = self._world.is_lost()
            done = _Done(action.client, action.version, None if lost else timing)
            heapq.heappush(self._events, (now_s + seconds, next(self._order), done))
            self._sent_bytes += self._work.model_bytes
        elif isinstance(action, Aggregate):
            self._aggregate(now_s, action, on_evaluation)

    def _aggregate(
        self,
        now_s: float,
        action: Aggregate,
        on_evaluation: Callable[[float, int, float], None] | None,
    ) -> None:
        for update in action.updates:
            check_update(update, self._classifier.parameters)
        sizes = [self._sizes[client] for client in action.clients]
        weights = [size * late for size, late in zip(sizes, action.staleness, strict=True)]
        deltas = [update.delta for update in action.updates]
        if self._strategy.remembers:
            for client, delta in zip(action.clients, deltas, strict=True):
                self._controller.surprised(client, self._memory.distance(client, delta))
            change = self._memory.combine(action.clients, deltas, weights)
        else:
            change = np.average(deltas, axis=0, weights=weights).astype(np.float32)
        self._model = self._model + change
        version = self._controller.version
        self._models[version] = self._model
        in_use = {done.version for _, _, done in self._events} | {version}
        self._models = {v: model for v, model in self._models.items() if v in in_use}
        if version % self._evaluate_every == 0:
            self._evaluate(now_s, on_evaluation)

    def _evaluate(
        self, now_s: float, on_evaluation: Callable[[float, int, float], None] | None
    ) -> None:
        scores = self._classifier.probabilities(self._model, self._data.test_images)
        version = self._controller.version
        evaluation = evaluate(now_s, version, scores.argmax(1), self._data.test_labels)
        alarm = self._monitor.add(evaluation)
        if alarm:
            self._alarms.setdefault(alarm.split(":")[0])
        if on_evaluation:
            on_evaluation(now_s, version, evaluation.accuracy)
