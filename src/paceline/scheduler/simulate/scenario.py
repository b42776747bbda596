"""What is true in a simulation, and what the scheduler is given of it.

    durations     known     the scheduler has each job's true work
                  unknown   it has none
                  wrong     its figure is off by a factor between 1/f and f
    rates         its rates are off by a share of up to e, by profile and devices; jobs then report
                  their progress, as an executor does, so that it can correct them
    failures      each node fails by itself, at exponentially distributed intervals
    restart       seconds without progress of each restart, instead of the trace's

All randomness comes from one seed, a stream for each use: the same jobs are misjudged alike under
every policy.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from paceline.core.randomness import make_generator
from paceline.scheduler.rates.corrected import CorrectedRates
from paceline.scheduler.simulate.engine import NodeFailure, World
from paceline.scheduler.simulate.metrics import alone_times_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.scheduler.cluster import Cluster
    from paceline.scheduler.formats.workload import Queue
    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape
    from paceline.scheduler.rates.rates import Rates

Durations: TypeAlias = Literal["known", "unknown"] | float

REPAIR_S = 3600.0  # mean time until a lost node is back
REPORT_S = 600.0  # between two reports of a job where rates are wrong
_FAILURE_HORIZON = 10.0  # in times that the cluster would need for all work


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """How a simulation departs from its trace; see the module.

    Attributes:
        durations: what the scheduler has of each job's work: a number is the factor by which its
            figure is wrong at most.
        rate_error: share by which its rates are wrong at most; 0: they are right.
        node_mtbf_s: mean time between failures of one node; 0: none fails.
        restart_s: of each restart; None: the trace's.
        seed: of all errors and failures.
    """

    durations: Durations = "known"
    rate_error: float = 0.0
    node_mtbf_s: float = 0.0
    restart_s: float | None = None
    seed: int = 1


def make_world(queue: Queue, cluster: Cluster, scenario: Scenario) -> World:
    """Return what is true of a queue on a cluster, and what the scheduler is given of it."""
    jobs: Sequence[Job] = queue.jobs
    if scenario.restart_s is not None:
        jobs = [dataclasses.replace(job, restart_s=scenario.restart_s) for job in jobs]
    return World(
        jobs=jobs,
        cluster=cluster,
        rates=queue.rates,
        failures=node_failures(jobs, cluster, queue.rates, scenario),
        told=_Told(scenario),
        report_s=REPORT_S if scenario.rate_error else 0.0,
    )


def believed_rates(rates: Rates, scenario: Scenario) -> Rates:
    """Return the rates that the scheduler is given; wrong ones learn from reports."""
    return CorrectedRates(MisjudgedRates(rates, scenario)) if scenario.rate_error else rates


@dataclass(frozen=True, slots=True)
class _Told:
    """Makes of a job what the scheduler is given of it."""

    scenario: Scenario

    def __call__(self, job: Job) -> Job:
        durations = self.scenario.durations
        if durations == "known" or job.work is None:
            return job
        if durations == "unknown":
            return dataclasses.replace(job, work=None)
        generator = make_generator(self.scenario.seed, "duration", job.name)
        wrong = math.exp(generator.uniform(-1, 1) * math.log(durations))
        return dataclasses.replace(job, work=job.work * wrong)


class MisjudgedRates:
    """Rates that are wrong by a share of up to `Scenario.rate_error`.

    The error is one factor for each profile and number of devices of a type, and one for each group
    of neighbours; 0 stays 0, since what cannot run is known to a scheduler.
    """

    def __init__(self, rates: Rates, scenario: Scenario) -> None:
        self.rates = rates
        self.scenario = scenario
        self._factors: dict[tuple[str, ...], float] = {}

    @property
    def most_sharing(self) -> int:
        """The most jobs on one set of devices."""
        return self.rates.most_sharing

    def alone(self, job: Job, shape: Shape, work_done: float = 0.0) -> float:
        """Return the misjudged rate; see `Rates.alone`."""
        rate = self.rates.alone(job, shape, work_done)
        return rate * self._factor(job.profile, shape.device_type, f"{shape.devices}")

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the misjudged share; see `Rates.kept`."""
        kept = self.rates.kept(job, neighbours, shape)
        names = sorted(neighbour.profile for neighbour in neighbours)
        return kept * self._factor(job.profile, shape.device_type, *names)

    def constant_until(self, job: Job, work_done: float) -> float:
        """Return when `alone` changes; see `Rates.constant_until`."""
        return self.rates.constant_until(job, work_done)

    def _factor(self, *key: str) -> float:
        factor = self._factors.get(key)
        if factor is None:
            error = self.scenario.rate_error
            generator = make_generator(self.scenario.seed, "rate", *key)
            factor = self._factors[key] = 1 + float(generator.uniform(-error, error))
        return factor


def node_failures(
    jobs: Sequence[Job], cluster: Cluster, rates: Rates, scenario: Scenario
) -> list[NodeFailure]:
    """Return when nodes are lost, and for how long, in times long enough for any policy."""
    if not scenario.node_mtbf_s:
        return []
    alone_s = alone_times_s(jobs, cluster, rates)
    busy_s = float(alone_s @ np.array([job.devices for job in jobs]))
    busy_s /= sum(cluster.device_counts().values())
    last_s = max(job.submitted_s for job in jobs)
    until_s = last_s + _FAILURE_HORIZON * (busy_s + float(alone_s.max()))
    failures = []
    for node in cluster.nodes:
        generator = make_generator(scenario.seed, "failures", node.name)
        at_s = float(generator.exponential(scenario.node_mtbf_s))
        while at_s < until_s:
            for_s = float(generator.exponential(REPAIR_S))
            failures.append(NodeFailure(node.name, at_s, for_s))
            at_s += for_s + float(generator.exponential(scenario.node_mtbf_s))
    return failures
