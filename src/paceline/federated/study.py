"""Compares strategies: each is simulated with the same clients, data and first models.

for each seed: clients, devices, sessions; then each strategy on its own copies of them
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.randomness import make_generator
from paceline.core.record import Record
from paceline.federated.groups import class_mixes, poorest, thirds_by_speed
from paceline.federated.simulate.engine import FederationOutcome, FederationSimulation
from paceline.federated.simulate.images import ImageData, read_images
from paceline.federated.simulate.splits import dirichlet_split
from paceline.federated.simulate.world import SimulatedClients
from paceline.federated.strategies import make_strategy
from paceline.report.federation.model import (
    FederationPay,
    FederationReport,
    FederationRun,
    UnpaidWork,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.federated.config import FederationConfig
    from paceline.federated.pay import PaidRounds
    from paceline.federated.updates import Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint(Record):
    """One evaluation.

    Attributes:
        at_s: simulated seconds.
        round: version of the model.
        accuracy: of the model.
        by_class: accuracy on each class.
        by_group: accuracy for the fast, middle and slow third of the clients.
        by_cluster: accuracy for each cluster of clients whose updates are alike, as they report it.
    """

    at_s: float
    round: int
    accuracy: float
    by_class: tuple[float, ...] = ()
    by_group: dict[str, float] = field(default_factory=dict)
    by_cluster: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FederationResult(Record):
    """What one strategy came to with one seed.

    Attributes:
        strategy: its name.
        seed: of the clients and of the strategy.
        to_target_s: simulated seconds to the accuracy that was asked for; None: never.
        final, worst_class: accuracy in the end, in all and of the poorest class.
        worst_clients: accuracy in the end at the tenth of the clients for which it is poorest.
        rounds, seconds: that were simulated.
        fairness: Jain's index of the updates of each client that were used.
        work_fairness: Jain's index of the seconds that each client worked.
        never_used: share of clients without one.
        never_online: share of clients that were offline all the time.
        waste: share of the clients' seconds that was thrown away.
        sent_bytes: to and from all clients.
        alarms: of the monitor.
        unpaid: updates that were not used or did not come, the most frequent first.
        curve: evaluations, oldest first.
        returned: used updates of each client.
        cluster_of: the cluster of each client in the end; -1: none.
    """

    strategy: str
    seed: int
    to_target_s: float | None
    final: float
    worst_class: float
    rounds: int
    seconds: float
    fairness: float
    never_used: float
    never_online: float
    waste: float
    sent_bytes: int
    worst_clients: float = 0.0
    work_fairness: float = 0.0
    alarms: tuple[str, ...] = ()
    unpaid: tuple[UnpaidWork, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    returned: tuple[int, ...] = ()
    cluster_of: tuple[int, ...] = ()


def read_data(config: FederationConfig) -> tuple[ImageData, list[float]]:
    """Return the images, and the scores of devices.

    Raises:
        NotFound, ConfigError, Missing: a file is missing or of another format.
    """
    data = read_images(config.data.folder)
    if config.data.test_samples:
        count = config.data.test_samples
        data = data._replace(
            test_images=data.test_images[:count], test_labels=data.test_labels[:count]
        )
    return data, _read_scores(config.scores)


def _read_scores(path: str) -> list[float]:
    if not path:
        return []
    try:
        rows = json.loads(read_text(Path(path)))
        scores = [float(row["cpu_f_score"]) for row in rows if row.get("cpu_f_score")]
    except (ValueError, AttributeError, TypeError) as problem:
        raise ConfigError(
            "a file of scores is not a JSON list of objects",
            where=path,
            why=str(problem),
            fix='Write [{"cpu_f_score": 1.0}, ...]',
        ) from problem
    if not scores:
        raise ConfigError(
            "a file of scores has no cpu_f_score",
            where=path,
            fix='Write [{"cpu_f_score": 1.0}, ...]',
        )
    return scores


def simulate(
    config: FederationConfig,
    data: ImageData,
    scores: Sequence[float],
    strategy: str,
    seed: int,
    *,
    pay: PaidRounds | None = None,
) -> FederationResult:
    """Return what a strategy comes to; the same arguments bring the same result.

    Args:
        config: of the federation; its strategy and seed do not count here.
        data: that clients share out.
        scores: of devices.
        strategy: its name.
        seed: of everything that is drawn.
        pay: pays clients; None: nobody is paid.
    """
    split = make_generator(seed, "split")
    parts = dirichlet_split(
        data.labels, config.clients, config.data.alpha, split, most=config.data.most_samples
    )
    world = SimulatedClients.make(
        config.clients, config.devices, make_generator(seed, "world"), scores
    )
    world.draw_memory(make_generator(seed, "memory"))
    if config.data.slow_classes:
        slow = np.isin(data.labels, config.data.slow_classes)
        world.order_by(np.array([slow[part].mean() for part in parts]))
    chosen = make_strategy(strategy, config.cohort, config.goals)
    simulation = FederationSimulation(
        data, parts, world, chosen, work=config.work, seed=seed, faults=config.faults, pay=pay
    )
    mixes = class_mixes(data.labels, parts, int(data.test_labels.max()) + 1)
    seconds = simulation.expected_s()
    outcome = simulation.run(config.budget_s, config.rounds)
    return _result(outcome, strategy, seed, config.target, mixes, seconds)


def _result(
    outcome: FederationOutcome,
    strategy: str,
    seed: int,
    target: float,
    mixes: np.ndarray,
    seconds: np.ndarray,
) -> FederationResult:
    monitor = outcome.monitor
    groups = thirds_by_speed(mixes, seconds)
    return FederationResult(
        strategy=strategy,
        seed=seed,
        to_target_s=monitor.seconds_to(target),
        final=monitor.final if monitor.evaluations else 0.0,
        worst_class=monitor.worst_class if monitor.evaluations else 0.0,
        worst_clients=poorest(mixes, monitor.by_class) if monitor.evaluations else 0.0,
        rounds=outcome.rounds,
        seconds=outcome.seconds,
        fairness=outcome.fairness,
        work_fairness=outcome.work_fairness,
        never_used=outcome.never_used,
        never_online=outcome.never_online,
        waste=outcome.waste,
        sent_bytes=outcome.sent_bytes,
        alarms=outcome.alarms,
        unpaid=_counted(outcome.refused),
        curve=tuple(
            CurvePoint(
                at_s=e.at_s,
                round=e.round,
                accuracy=e.accuracy,
                by_class=e.by_class,
                by_group={name: float(mix @ e.by_class) for name, mix in groups.items()},
                by_cluster=e.by_cluster,
            )
            for e in monitor.evaluations
        ),
        returned=tuple(int(count) for count in outcome.returned),
        cluster_of=tuple(int(number) for number in outcome.cluster_of),
    )


def _counted(refusals: Sequence[Refusal]) -> tuple[UnpaidWork, ...]:
    """Return the refusals of each client and check, counted."""
    found: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refusals:
        found.setdefault((refusal.client, refusal.check), []).append(refusal)
    rows = [
        UnpaidWork(client=client, check=check, count=len(alike), reason=alike[0].reason)
        for (client, check), alike in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.count))


def _by_cluster(result: FederationResult) -> np.ndarray:
    """Return the accuracies for clusters; nan before a cluster was found."""
    clusters = len(result.curve[-1].by_cluster) if result.curve else 0
    found = np.full((len(result.curve), clusters), np.nan)
    for row, point in zip(found, result.curve, strict=True):
        row[: len(point.by_cluster)] = point.by_cluster
    return found


def to_report(
    title: str,
    config: FederationConfig,
    results: Sequence[FederationResult],
    pay: FederationPay | None = None,
) -> FederationReport:
    """Return the report of some results.

    Args:
        title: of the page.
        config: that all of them have in common.
        results: at least one.
        pay: of the only result, if it was paid.
    """
    data = config.data.folder or "the digits of scikit-learn"
    slow = (
        f", classes {config.data.slow_classes} on slow devices" if config.data.slow_classes else ""
    )
    return FederationReport(
        title=title,
        summary=f"{config.clients} clients, {config.devices.kind}, with {data}, divided by a "
        f"Dirichlet distribution of {config.data.alpha:g}{slow}; cohorts of {config.cohort}.",
        target=config.target,
        budget_s=config.budget_s,
        pay=pay,
        runs=tuple(
            FederationRun(
                strategy=result.strategy,
                seed=result.seed,
                to_target_s=result.to_target_s,
                final=result.final,
                worst_class=result.worst_class,
                fairness=result.fairness,
                never_used=result.never_used,
                never_online=result.never_online,
                waste=result.waste,
                sent_bytes=result.sent_bytes,
                at_s=np.array([point.at_s for point in result.curve]),
                accuracy=np.array([point.accuracy for point in result.curve]),
                returned=np.array(result.returned),
                alarms=result.alarms,
                worst_clients=result.worst_clients,
                by_class=np.array([point.by_class for point in result.curve]),
                by_group={
                    name: np.array([point.by_group[name] for point in result.curve])
                    for name in (result.curve[0].by_group if result.curve else ())
                },
                by_cluster=_by_cluster(result),
                cluster_of=np.array(result.cluster_of),
                unpaid=result.unpaid,
            )
            for result in results
        ),
    )
