"""What a trace file comes to: jobs, and their rates where the trace has them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.scheduler.job import Job
from paceline.scheduler.rates.rates import Rates


@dataclass(frozen=True, slots=True)
class Queue:
    """A workload of a cluster.

    Attributes:
        jobs: in the order of their submission, with their true work.
        rates: true rates of the jobs.
        notes: what the file has that is not among the jobs, in words.
    """

    jobs: tuple[Job, ...]
    rates: Rates
    notes: tuple[str, ...] = ()
