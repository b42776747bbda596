"""What the report of a queue is drawn from: plain data, wherever it was simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitOfSize(Record):
    """How long jobs of one size waited before their first start."""

    devices: int
    jobs: int
    mean_s: float
    p99_s: float


class HeldDevices(NamedTuple):
    """A time in which a job held devices.

    Attributes:
        name: of the job.
        begin_s, end_s: seconds since the queue's first moment.
        pieces: neighbouring devices, as the number of the first one and how many. Devices are
            numbered through all nodes. Jobs that share devices have equal pieces.
    """

    name: str
    begin_s: float
    end_s: float
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueFigures(Record):
    """Figures of a policy; times in seconds, shares of 1.

    Attributes:
        policy: its name.
        jobs: that ended.
        refused: jobs that the policy refused.
        jct_mean_s, jct_p50_s, jct_p99_s: completion times.
        makespan_s: from the first submission to the last end.
        rho_worst, rho_p99: finish-time fairness; 1 is an equal share of the cluster.
        rho_above_1_1: share of jobs with a worse one than 1.1.
        allocated: of the devices' time.
        useful: of the devices' time, as each job's work would take alone at its best.
        restarts: starts of jobs after their first.
        waits: by number of devices.
        jct_bound_s, makespan_bound_s: what no policy can beat: each job alone, at once, at its
            best.
    """

    policy: str
    jobs: int
    refused: int
    jct_mean_s: float
    jct_p50_s: float
    jct_p99_s: float
    makespan_s: float
    rho_worst: float
    rho_p99: float
    rho_above_1_1: float
    allocated: float
    useful: float
    restarts: int
    waits: tuple[WaitOfSize, ...]
    jct_bound_s: float
    makespan_bound_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyRun:
    """A policy and what became of the jobs under it.

    Attributes:
        figures: of the whole.
        ended_s: ends of the jobs since the first submission, shape (jobs,).
        jct_s: completion times, shape (jobs,).
        alone_s: seconds that each job takes alone at its best, shape (jobs,).
        held: in any order; empty if it was not kept.
    """

    figures: QueueFigures
    ended_s: np.ndarray
    jct_s: np.ndarray
    alone_s: np.ndarray
    held: tuple[HeldDevices, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueueReport:
    """Policies that played the same jobs.

    Attributes:
        title: for example the name of the trace.
        summary: jobs, cluster and assumptions in words.
        cautions: what a reader must know first, a sentence each.
        nodes: name of each node and its number of devices.
        runs: one for each policy, in the order to show.
    """

    title: str
    summary: str
    cautions: tuple[str, ...]
    nodes: tuple[tuple[str, int], ...]
    runs: tuple[PolicyRun, ...]
