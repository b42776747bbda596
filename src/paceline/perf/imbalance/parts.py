"""How long each rank was busy in each step of a run, and which parts of that a remedy can change.

A synchronous step lasts as long as its slowest rank is busy, and then communicates::

    step_t = max over ranks of busy_rt + communication_t
    busy_rt = the rank's step without waiting for other ranks and without transfers

The parts of a rank's busy time overlap each other, since they are of different sources::

    busy     |-- input --|-- forward --|-- backward --|- optimizer -|- host, other -|
    sharable |------------------------------------------|       grows with the rank's batch
    no core      ###        ####           ##                   runnable, but another thread ran

Ranks of one node share its cores and caches, so that they are late together or in turn. Therefore
a node's ranks stay together here, in the same step. Different nodes are independent of each other,
but for what ranks do in every `period`-th step, such as logging: that they do at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.errors import NotFound
from paceline.trace.analysis.periods import periodic
from paceline.trace.analysis.shapes import PatternRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis import Analysis
    from paceline.trace.analysis.counters import StepCounters
    from paceline.trace.analysis.phases import RankPhases

WARM_UP_STEPS = 10  # at most a third of the steps
LEAST_STEPS = 16  # after the warm-up, for a forecast
_COMMUNICATES = [PHASES.index(name) for name in ("waiting", "transfer")]
_SHARABLE = [PHASES.index(name) for name in ("input", "copy", "forward", "backward")]
_PASSES = [PHASES.index(name) for name in ("forward", "backward")]
_OTHER = PHASES.index("other")
# Of a rank's CPU times of steps: more threads than cores spin for each other in many of them, which
# is no work that is to be done.
_NEEDED_CPU = 0.25
_LATE_SHARE = 0.05  # of a median step, by which every k-th step must be longer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BusyParts:
    """Measured seconds of each rank and step, after the warm-up.

    Attributes:
        busy_s: until the rank only waits or communicates, shape (ranks, steps).
        sharable_s: part of it that grows with the number of samples, shaped as `busy_s`; what no
            phase names is in it only if the traces name no passes of a model.
        no_core_s: part of it in which the main thread was runnable without a core, shaped as
            `busy_s`; None if the traces do not say.
        free_s: time in which the rank waits or communicates, shaped as `busy_s`.
        nodes: number of the node of each rank, from 0, shape (ranks,).
        communication_s: that a step lasts longer than its slowest rank is busy, the mean.
        step_s: mean step time.
        period: each `period`-th step is longer; 1 if none is.
        loader_workers: processes or threads that load for each rank; None if not known.
        cores: of a node; 0 if not known.
        cpu_s: CPU time that the busiest node's ranks need in a step, and their loader workers if
            `workers_counted`.
        workers_counted: whether it has the CPU time of loader workers.
    """

    busy_s: np.ndarray
    sharable_s: np.ndarray
    no_core_s: np.ndarray | None
    free_s: np.ndarray
    nodes: np.ndarray
    communication_s: float
    step_s: float
    period: int = 1
    loader_workers: int | None = None
    cores: int = 0
    cpu_s: float = 0.0
    workers_counted: bool = False

    @property
    def ranks(self) -> int:
        """Number of measured ranks."""
        return int(self.busy_s.shape[0])

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return int(self.busy_s.shape[1])

    @property
    def node_count(self) -> int:
        """Number of measured nodes."""
        return int(self.nodes.max()) + 1

    @property
    def least_step_s(self) -> float:
        """What a step takes at least if all cores of a node are always busy; 0 if not known.

        No more than the measured step, which had the same work.
        """
        return min(self.step_s, self.cpu_s / self.cores) if self.cores else 0.0


def busy_parts(
    analysis: Analysis,
    *,
    loader_workers: int | None = None,
    cores: int = 0,
    worker_cpu_s: float | None = None,
) -> BusyParts:
    """Return the parts of the steps of an analysed run.

    Args:
        analysis: of the run.
        loader_workers: of each rank; None if not known.
        cores: of a node; 0 if not known.
        worker_cpu_s: CPU time of a rank's loader workers in a step, where they are processes of
            their own, which traces do not count; None if not known.

    Raises:
        NotFound: the run has too few steps that all ranks recorded, or its ranks do not all wait
            for the slowest of them.
    """
    if analysis.pipeline is not None or not analysis.matches.synchronising().any():
        stages = "its model is in stages, which wait for each other in turn"
        raise NotFound(
            "the ranks do not all wait for the slowest of them in a step",
            why=stages if analysis.pipeline is not None else "no collective joins them",
            fix="Record ranks that divide batches, such as those of DistributedDataParallel",
        )
    return parts_of_run(
        analysis.phases,
        analysis.counters,
        [rank.status.boot_id for rank in analysis.trace.ranks],
        loader_workers=loader_workers,
        cores=cores,
        worker_cpu_s=worker_cpu_s,
    )


def parts_of_run(
    phases: Sequence[RankPhases],
    counters: Sequence[StepCounters],
    nodes: Sequence[str],
    *,
    loader_workers: int | None = None,
    cores: int = 0,
    worker_cpu_s: float | None = None,
) -> BusyParts:
    """Return the parts of a run's steps; arguments and errors as of `busy_parts`.

    Args:
        phases: of each rank.
        counters: of each rank's main thread.
        nodes: what names each rank's node.
        loader_workers: as of `busy_parts`.
        cores: as of `busy_parts`.
        worker_cpu_s: as of `busy_parts`.
    """
    kept = _kept_steps(phases)
    train_s = np.array([rank.train_s[kept] for rank in phases])
    seconds = np.array([rank.seconds[kept] for rank in phases])
    free_s = seconds[:, :, _COMMUNICATES].sum(axis=2)
    busy_s = np.maximum(0.0, train_s - free_s)
    sharable = _SHARABLE if seconds[:, :, _PASSES].any() else [*_SHARABLE, _OTHER]
    known = all(rank.known for rank in counters)
    no_core_s = np.array([rank.not_running_s[kept] for rank in counters]) if known else None
    ran_s = np.array([np.quantile(rank.running_s[kept], _NEEDED_CPU) for rank in phases])
    numbers = np.unique(np.asarray(nodes), return_inverse=True)[1]
    step_s = float(train_s.mean())
    return BusyParts(
        busy_s=busy_s,
        sharable_s=np.minimum(busy_s, seconds[:, :, sharable].sum(axis=2)),
        no_core_s=None if no_core_s is None else np.minimum(no_core_s, busy_s),
        free_s=free_s,
        nodes=numbers,
        communication_s=max(0.0, step_s - float(busy_s.max(axis=0).mean())),
        step_s=step_s,
        period=_period(busy_s),
        loader_workers=loader_workers,
        cores=cores,
        cpu_s=float(np.bincount(numbers, ran_s + (worker_cpu_s or 0.0)).max()),
        workers_counted=worker_cpu_s is not None or loader_workers == 0,
    )


def _kept_steps(phases: Sequence[RankPhases]) -> np.ndarray:
    """Return the numbers of the steps that all ranks recorded, without the warm-up."""
    steps = min((rank.steps for rank in phases), default=0)
    kept = np.ones(steps, dtype=bool)
    kept[: min(WARM_UP_STEPS, steps // 3)] = False
    for rank in phases:
        kept &= rank.recorded[:steps]
    if kept.sum() < LEAST_STEPS:
        raise NotFound(
            f"{int(kept.sum())} steps after the warm-up were recorded by all ranks",
            why=f"a forecast needs {LEAST_STEPS} or more",
            fix="Record a longer run",
        )
    return np.flatnonzero(kept)


def _period(busy_s: np.ndarray) -> int:
    """Return after how many steps a longer step comes again; 1: none does.

    What a script does now and then it does by the number of the step, on all ranks at once or on
    some: logging, collecting garbage, a checkpoint of rank 0.
    """
    slowest_s = busy_s.max(axis=0)
    usual_s = float(np.median(slowest_s))
    rules = PatternRules(
        late_threshold_s=_LATE_SHARE * usual_s, min_late_steps=0.65, max_p_value=0.01, series=1
    )
    found = periodic(slowest_s - usual_s, rules)
    if found is None or found.p_value > rules.max_p_value:
        return 1
    return found.period


def correlation_steps(series: np.ndarray) -> int:
    """Return for how many steps noise lasts: the integrated autocorrelation time, at least 1.

    It is summed until the first correlation that noise alone could make.
    Source: A. Sokal, Monte Carlo methods in statistical mechanics (1997), section 3.

    Args:
        series: shape (steps,).
    """
    away = series - series.mean()
    total = float((away**2).sum())
    if total <= 0.0:
        return 1
    noise = 2 / math.sqrt(len(series))
    time = 1.0
    for lag in range(1, len(series) // 4):
        correlation = float((away[lag:] * away[:-lag]).sum()) / total
        if correlation < noise:
            break
        time += 2 * correlation
    return math.ceil(time)
