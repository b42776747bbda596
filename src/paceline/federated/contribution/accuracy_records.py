"""Selection and pay by records of accuracy, as published: a baseline, and a mode of its own.

Each provider's record is a decaying mean of the accuracy that its update had when it was evaluated
in training anyway. The next round takes the providers with the best records, and some at random,
so that no provider is forgotten and the model does not fit a few of them too closely. A round's
tokens are divided by how far records exceed the model's accuracy before the round.

The abstract names records and random exploration, and no formula; the formulas are ours. It neither
looks for copies nor for replays, and a free rider that sends almost nothing has the model's own
accuracy.
Source: J. Han et al., TIFF: Tokenized Incentive for Federated Learning, IEEE CLOUD 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np


class AccuracyRecords:
    """What is known of the accuracy of each provider's updates.

    Args:
        exploration: share of a round's places that are drawn at random.
        memory: weight of a new accuracy in a record.
    """

    def __init__(self, *, exploration: float = 0.3, memory: float = 0.3) -> None:
        if not 0 <= exploration <= 1 or not 0 < memory <= 1:
            raise UsageError(
                f"exploration {exploration:g} and memory {memory:g} must be shares",
                where="contribution",
                fix="Give an exploration in [0, 1] and a memory in (0, 1]",
            )
        self.exploration, self.memory = exploration, memory
        self._records: dict[str, float] = {}

    def select(
        self, clients: Sequence[str], count: int, rng: np.random.Generator
    ) -> tuple[str, ...]:
        """Return `count` of the clients: those with the best records, and some at random.

        Clients without a record are only drawn at random; as many are drawn as it takes.
        """
        known = [client for client in clients if client in self._records]
        known.sort(key=self._records.__getitem__, reverse=True)
        best = known[: min(len(known), count - round(self.exploration * count))]
        rest = [client for client in clients if client not in set(best)]
        drawn = rng.choice(len(rest), min(len(rest), count - len(best)), replace=False)
        return (*best, *(rest[index] for index in drawn))

    def scores(self, accuracy: Mapping[str, float], before: float) -> dict[str, float]:
        """Record a round, and return what each of its clients is worth; not negative.

        Args:
            accuracy: of the model after each client's update alone.
            before: accuracy of the model before.
        """
        for client, value in accuracy.items():
            last = self._records.get(client, value)
            self._records[client] = last + self.memory * (value - last)
        return {client: max(0.0, self._records[client] - before) for client in accuracy}

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes; JSON data."""
        return {"records": dict(self._records)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._records = dict(state["records"])
