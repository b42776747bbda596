"""What the report of a federation is drawn from: plain data, wherever it was trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FederationRun:
    """What one strategy came to with one seed.

    Attributes:
        strategy: its name.
        seed: of everything that was drawn.
        to_target_s: simulated seconds to the target; None: not reached.
        final, worst_class: accuracy in the end, in all and of the poorest class.
        fairness: Jain's index of the used updates of each client.
        never_used, never_online: shares of clients.
        waste: share of the clients' seconds whose results were thrown away.
        sent_bytes: to and from all clients.
        at_s, accuracy: of each evaluation; shape (evaluations,).
        returned: used updates of each client; shape (clients,).
        alarms: sentences.
    """

    strategy: str
    seed: int
    to_target_s: float | None
    final: float
    worst_class: float
    fairness: float
    never_used: float
    never_online: float
    waste: float
    sent_bytes: int
    at_s: np.ndarray
    accuracy: np.ndarray
    returned: np.ndarray
    alarms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FederationReport:
    """Strategies that trained the same clients.

    Attributes:
        title: for example the name of the file.
        summary: clients, data and assumptions in words.
        target: accuracy that was asked for.
        budget_s: simulated seconds that each strategy had.
        runs: of all strategies and seeds.
    """

    title: str
    summary: str
    target: float
    budget_s: float
    runs: tuple[FederationRun, ...]

    @property
    def by_strategy(self) -> dict[str, list[FederationRun]]:
        """The runs of each strategy, in the order of their first run."""
        found: dict[str, list[FederationRun]] = {}
        for run in self.runs:
            found.setdefault(run.strategy, []).append(run)
        return found
