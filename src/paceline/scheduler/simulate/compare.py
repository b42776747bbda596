"""Plays one workload against several policies, each from the beginning."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.report.queue.model import QueueFigures
from paceline.scheduler.policies.fitting import never_fits
from paceline.scheduler.rates.model import RateModel
from paceline.scheduler.simulate.engine import QueueOutcome, Simulation
from paceline.scheduler.simulate.metrics import metrics
from paceline.scheduler.simulate.scenario import Scenario, believed_rates, make_world
from paceline.scheduler.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.scheduler.cluster import Cluster
    from paceline.scheduler.decide import Policy
    from paceline.scheduler.formats.workload import Queue
    from paceline.scheduler.job import Job

UNTYPED = "gpu"  # the device type of a cluster that names none
_IDLE_INSTANTS = 10_000  # without a job running, and none started: the policy will start none


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's simulation.

    Attributes:
        outcome: jobs, decisions and spans.
        metrics: its figures.
    """

    outcome: QueueOutcome
    metrics: QueueFigures


def fit_queue(queue: Queue, cluster: Cluster) -> tuple[Queue, dict[str, str]]:
    """Return the jobs that can run on a cluster, and why each of the others never can, by name.

    On a cluster whose devices have no type, jobs may run on any device. Rates are those on the
    nodes and over the links of the cluster.
    """
    jobs: Sequence[Job] = queue.jobs
    if isinstance(queue.rates, RateModel):
        queue = dataclasses.replace(queue, rates=queue.rates.on(cluster))
    if set(cluster.device_counts()) == {UNTYPED}:
        jobs = [dataclasses.replace(job, device_types=()) for job in jobs]
    state = State(cluster, queue.rates)
    reasons = {job.name: never_fits(state, job) for job in jobs}
    kept = tuple(job for job in jobs if not reasons[job.name])
    refused = {name: reason for name, reason in reasons.items() if reason}
    return dataclasses.replace(queue, jobs=kept), refused


def simulate(
    queue: Queue,
    cluster: Cluster,
    policy: Policy,
    scenario: Scenario,
    *,
    log: bool = True,
    on_progress: Callable[[Simulation], None] | None = None,
) -> Run:
    """Play a workload against a policy.

    Args:
        queue: jobs that can all run on the cluster: see `fit_queue`.
        cluster: all nodes.
        policy: a new one: policies keep what they have seen.
        scenario: what is wrong in the scheduler's knowledge, and what fails.
        log: keep decisions and spans.
        on_progress: called after each instant.

    Raises:
        UsageError: the policy leaves jobs waiting for ever.
    """
    world = make_world(queue, cluster, scenario)
    simulation = Simulation(world, policy, believed_rates(queue.rates, scenario), log=log)
    idle = 0

    def watch(running: Simulation) -> None:
        nonlocal idle
        idle = 0 if running.state.running else idle + 1
        if idle > _IDLE_INSTANTS and not running.state.inventory.lost:
            raise _stuck(running, policy)
        if on_progress is not None:
            on_progress(running)

    outcome = simulation.run(progress=watch)
    if simulation.jobs_left:
        raise _stuck(simulation, policy)
    return Run(outcome, metrics(outcome, queue.rates))


def _stuck(simulation: Simulation, policy: Policy) -> UsageError:
    name = next(iter(simulation.state.waiting), "")
    return UsageError(
        f"policy '{policy.name}' leaves {simulation.jobs_left} jobs waiting for ever",
        where=f"job '{name}', at {simulation.now_s:.0f} s",
        fix="Choose another policy, or a cluster on which these jobs fit",
    )
