"""Figures of a simulated or real queue, and what no scheduler could beat.

completion time   end - submission of a job (JCT)
makespan          last end - first submission
rho               finish-time fairness: completion time / (time alone x N), N the mean number of
                  jobs in the queue while the job was in it: a job that got an equal share of
                  the cluster all the time has 1. K. Mahajan et al., Themis, NSDI 2020
allocated         seconds x devices held / seconds x devices of the cluster until the makespan
useful            seconds x devices that the work takes with each job alone on the type and number
                  of devices where that is least / the same; above allocated only if jobs share
lower bound       of the mean completion time: every job alone, at once, at its best of all numbers
                  of devices; of the makespan: the longest such job
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import UsageError
from paceline.report.queue.model import QueueFigures, WaitOfSize
from paceline.scheduler.placement import close_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.scheduler.cluster import Cluster
    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape
    from paceline.scheduler.rates.rates import Rates
    from paceline.scheduler.simulate.engine import JobOutcome, QueueOutcome


class Ideal(NamedTuple):
    """A job that has the cluster for itself.

    Attributes:
        seconds: from begin to end, always at its fastest type and number of devices; where its
            rate changes with its progress, it changes its devices at no cost.
        device_seconds: of its work alone, always where they are fewest.
    """

    seconds: float
    device_seconds: float


def metrics(outcome: QueueOutcome, rates: Rates) -> QueueFigures:
    """Return the figures of a simulation.

    Args:
        outcome: of a run to the end.
        rates: true rates.

    Raises:
        UsageError: no job ended.
    """
    ended = [job for job in outcome.jobs.values() if job.ended_s is not None]
    if not ended:
        raise UsageError("no job ended", fix="Look at the reasons for which jobs were refused")
    submitted_s = np.array([job.job.submitted_s for job in ended])
    ended_s = np.array([job.ended_s for job in ended], float)
    jct_s = ended_s - submitted_s
    ideal = np.array(ideals([job.job for job in ended], outcome.cluster, rates))
    alone_s, device_seconds = ideal.T
    makespan_s = float(ended_s.max() - submitted_s.min())
    rho = jct_s / (alone_s * np.maximum(1.0, mean_jobs(submitted_s, ended_s)))
    capacity_s = makespan_s * sum(outcome.cluster.device_counts().values())
    return QueueFigures(
        policy=outcome.policy,
        jobs=len(ended),
        refused=sum(bool(job.refused) for job in outcome.jobs.values()),
        jct_mean_s=float(jct_s.mean()),
        jct_p50_s=float(np.median(jct_s)),
        jct_p99_s=float(np.quantile(jct_s, 0.99)),
        makespan_s=makespan_s,
        rho_worst=float(rho.max()),
        rho_p99=float(np.quantile(rho, 0.99)),
        rho_above_1_1=float((rho > 1.1).mean()),
        allocated=sum(job.held_s for job in ended) / capacity_s,
        useful=float(device_seconds.sum()) / capacity_s,
        restarts=sum(job.starts - 1 for job in ended),
        waits=_waits(ended),
        jct_bound_s=float(alone_s.mean()),
        makespan_bound_s=float((submitted_s + alone_s).max() - submitted_s.min()),
    )


def ideals(jobs: Sequence[Job], cluster: Cluster, rates: Rates) -> list[Ideal]:
    """Return what each job would take alone on the cluster; infinity for one that can never run.

    All numbers of devices within a job's limits are tried, since a policy may choose any: where
    devices leave a node, or measured rates are not monotone, the best one is anywhere.
    """
    known: dict[tuple[object, ...], Ideal] = {}
    found = []
    for job in jobs:
        key = (job.profile, job.limits, job.devices, job.device_types, job.work, job.start_s)
        if key not in known:
            known[key] = _ideal(job, _shapes(job, cluster), rates)
        found.append(known[key])
    return found


def alone_times_s(jobs: Sequence[Job], cluster: Cluster, rates: Rates) -> NDArray[np.float64]:
    """Return the seconds of `ideals`, shape (jobs,)."""
    return np.array([ideal.seconds for ideal in ideals(jobs, cluster, rates)], float)


def _shapes(job: Job, cluster: Cluster) -> list[Shape]:
    """Return the shapes of all sizes that a job may have on a cluster, close together."""
    largest = cluster.largest_nodes()
    low, high = job.limits
    return [
        close_together(kind, size, largest[kind])
        for kind, count in cluster.device_counts().items()
        if not job.device_types or kind in job.device_types
        for size in range(low, min(high, count) + 1)
    ]


def _ideal(job: Job, shapes: Sequence[Shape], rates: Rates) -> Ideal:
    assert job.work is not None
    seconds, device_seconds, done = job.start_s, 0.0, 0.0
    while done < job.work:
        until = min(job.work, rates.constant_until(job, done))
        rated = [(rates.alone(job, shape, done), shape.devices) for shape in shapes]
        fastest = max((rate for rate, _ in rated), default=0.0)
        if fastest <= 0:
            return Ideal(math.inf, math.inf)
        seconds += (until - done) / fastest
        device_seconds += (until - done) / max(rate / devices for rate, devices in rated)
        done = until
    return Ideal(seconds, device_seconds)


def mean_jobs(
    submitted_s: NDArray[np.float64], ended_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return, for each job, the mean number of jobs in the queue while it was there.

    Args:
        submitted_s: of each job, shape (jobs,).
        ended_s: of each job, shape (jobs,).
    """
    times = np.concatenate([submitted_s, ended_s])
    steps = np.concatenate([np.ones(len(submitted_s)), -np.ones(len(ended_s))])
    order = np.argsort(times, kind="stable")
    times, count = times[order], np.cumsum(steps[order])
    # The integral of the count, at each time; jobs x seconds between two times are its difference.
    area = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))])
    inside = np.interp(ended_s, times, area) - np.interp(submitted_s, times, area)
    mean: NDArray[np.float64] = inside / np.maximum(ended_s - submitted_s, 1e-12)
    return mean


def _waits(ended: Sequence[JobOutcome]) -> tuple[WaitOfSize, ...]:
    by_size = sorted(ended, key=lambda job: job.job.devices)
    rows = []
    for devices, members in itertools.groupby(by_size, key=lambda job: job.job.devices):
        waits_s = [
            job.started_s - job.job.submitted_s for job in members if job.started_s is not None
        ]
        rows.append(
            WaitOfSize(
                devices=devices,
                jobs=len(waits_s),
                mean_s=float(np.mean(waits_s)),
                p99_s=float(np.quantile(waits_s, 0.99)),
            )
        )
    return tuple(rows)
