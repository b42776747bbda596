"""What the report of a federation is drawn from: plain data, wherever it was trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaidWork(Record):
    """What a client did not get paid for: updates that were not used or did not come.

    Attributes:
        client: its id.
        check: that they failed.
        count: how many.
        reason: of the first.
    """

    client: str
    check: str
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FederationPay:
    """What became of the tokens, from a ledger; amounts in micro-tokens.

    Attributes:
        issued: in circulation.
        flows: where they are in the end, as words and amounts; they add up to `issued`.
        by_client: what each provider earned, by its id; what is held in escrow is in it.
        consumers: who paid.
        verification: what checking every row of the ledger found, a sentence.
        is_sound: whether it found no damage.
    """

    issued: int
    flows: tuple[tuple[str, int], ...]
    by_client: dict[str, int]
    consumers: tuple[str, ...]
    verification: str
    is_sound: bool


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
        worst_clients: accuracy at the tenth of the clients for which the model is poorest.
        by_class: accuracy of each evaluation on each class; shape (evaluations, classes).
        by_group: accuracy of each evaluation for groups of clients; shape (evaluations,) each.
        by_cluster: accuracy of each evaluation for clusters of clients, nan before a cluster was
            found; shape (evaluations, clusters).
        cluster_of: the cluster of each client; -1: none.
        unpaid: updates that were not used or did not come.
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
    worst_clients: float = 0.0
    by_class: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    by_group: dict[str, np.ndarray] = field(default_factory=dict)
    by_cluster: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    cluster_of: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    unpaid: tuple[UnpaidWork, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FederationReport:
    """Strategies that trained the same clients.

    Attributes:
        title: for example the name of the file.
        summary: clients, data and assumptions in words.
        target: accuracy that was asked for.
        budget_s: simulated seconds that each strategy had.
        runs: of all strategies and seeds.
        pay: of the run that was paid; None: nobody was.
    """

    title: str
    summary: str
    target: float
    budget_s: float
    runs: tuple[FederationRun, ...]
    pay: FederationPay | None = None

    @property
    def by_strategy(self) -> dict[str, list[FederationRun]]:
        """The runs of each strategy, in the order of their first run."""
        found: dict[str, list[FederationRun]] = {}
        for run in self.runs:
            found.setdefault(run.strategy, []).append(run)
        return found
