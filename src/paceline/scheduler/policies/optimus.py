"""Marginal gains of remaining time (Optimus): elastic jobs, sizes chosen anew at every question.

Each job first gets the fewest devices with which it can run, those with the least time left first.
Then devices go out one by one to the job whose remaining time falls most for it::

    gain(job, n) = (work left / rate(n) - work left / rate(n + 1)) / 1 device

until no device is left or no gain is positive. Rates and remaining work are what the scheduler
estimates; where the work is not known, a job is taken to have as much left as it has done, Optimus'
fit of the loss curve being a model of its own. Optimus decides at intervals of ten minutes: see
`Rounds`.
Source: Y. Peng et al., Optimus: An Efficient Dynamic Resource Scheduler for Deep Learning Clusters,
EuroSys 2018, section 4.1 (marginal gain, equation 9); placement: section 4.2 (fewest nodes).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.scheduler.policies.fitting import allowed_types, best_rate, refuse_unfit
from paceline.scheduler.policies.replan import Wanted, replan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import JobState, State

_LEAST_KNOWN = 1.0  # unit of work: what a job of unknown work that has done nothing has left


@dataclass(frozen=True, slots=True)
class Optimus:
    """Devices go to the jobs whose remaining time falls most.

    Attributes:
        consolidate: keep jobs within nodes, see `Draft`.
    """

    consolidate: bool = False
    name: str = "optimus"

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield what gives each job its share of the devices."""
        yield from refuse_unfit(state, events)
        sizes = self.sizes(state)
        # Wide jobs first: they find nodes together.
        order = sorted(sizes, key=lambda job: (-sizes[job], job.job.submitted_s))
        wanted = [
            Wanted((job,), sizes[job], f"{sizes[job]} devices by the gain of remaining time")
            for job in order
        ]
        yield from replan(
            state,
            wanted,
            consolidate=self.consolidate,
            why_stopped="the devices were distributed anew by the gain of remaining time",
        )

    def wake_s(self, state: State) -> float | None:
        """Return None: it is asked at events, or in `Rounds`."""
        return None

    def sizes(self, state: State) -> dict[JobState, int]:
        """Return the number of devices of each job that gets any."""
        jobs = [*state.running.values(), *state.waiting.values()]
        free = sum(state.inventory.usable.values())
        rigid = [job for job in jobs if not job.job.preemptible and job.slot is not None]
        sizes = {job: job.slot.shape.devices for job in rigid if job.slot is not None}
        free -= sum(sizes.values())
        movable = [job for job in jobs if job not in sizes]
        for job in sorted(movable, key=lambda job: self._time_s(state, job, job.job.limits[0])):
            fewest = job.job.limits[0]
            if fewest <= free and best_rate(state, job, fewest) > 0:
                sizes[job] = fewest
                free -= fewest
        heap = [
            (-self._gain_s(state, job, sizes[job]), index, job)
            for index, job in enumerate(movable)
            if job in sizes
        ]
        heapq.heapify(heap)
        while free and heap:
            gain_s, index, job = heapq.heappop(heap)
            if gain_s >= 0:
                break
            sizes[job] += 1
            free -= 1
            heapq.heappush(heap, (-self._gain_s(state, job, sizes[job]), index, job))
        return sizes

    def _time_s(self, state: State, job: JobState, devices: int) -> float:
        rate = best_rate(state, job, devices)
        left = job.work_left(state.now_s)
        if left is None:
            left = max(job.work_done_at(state.now_s), _LEAST_KNOWN)
        return left / rate if rate > 0 else float("inf")

    def _gain_s(self, state: State, job: JobState, devices: int) -> float:
        """Return the seconds that the next device saves; 0 if the job may have no more."""
        most = max(
            (state.inventory.usable[kind] for kind in allowed_types(state, job.job)), default=0
        )
        if devices >= min(job.job.limits[1], most):
            return 0.0
        return self._time_s(state, job, devices) - self._time_s(state, job, devices + 1)
