"""Least attained service in discrete levels (Tiresias): no durations needed.

A job's attained service is time x devices. Jobs that attained little run first; levels keep jobs
that attained about the same from preempting one another all the time::

    level = number of thresholds that the service reached:  first, 2 first, 4 first, ...
    order = (level, order of the first submission)

A job that waited longer than `promote` times what it has run returns to level 0, so that none
starves. At the limit of many levels and a small first threshold this is processor sharing, with
one level it is first in, first out with backfill.
Source: J. Gu et al., Tiresias: A GPU Cluster Manager for Distributed Deep Learning, NSDI 2019,
section 3 (discretized 2D-LAS, PROMOTEKNOB). Its simulator has two thresholds, about one and two
device hours; more levels suit queues whose jobs differ more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.scheduler.policies.fitting import refuse_unfit, rigid_size
from paceline.scheduler.policies.replan import Wanted, replan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import JobState, State


@dataclass(frozen=True, slots=True)
class LeastAttained:
    """The jobs with the least attained service run, by levels.

    Attributes:
        first_s: seconds x devices at which a job leaves level 0; each next level takes twice as
            much.
        levels: how many.
        promote: a job that waits longer than so many times its attained service per device is
            treated as new; 0: never.
        consolidate: keep jobs within nodes, see `Draft`.
    """

    first_s: float = 3600.0
    levels: int = 8
    promote: float = 0.0
    consolidate: bool = False
    name: str = "las"

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield what makes the jobs of the lowest levels run."""
        yield from refuse_unfit(state, events)
        jobs = [*state.running.values(), *state.waiting.values()]
        level = {job: self.level(state, job) for job in jobs}
        order = sorted(jobs, key=lambda job: (level[job], job.job.submitted_s))
        wanted = [
            Wanted((job,), rigid_size(state, job.job), f"level {level[job]}") for job in order
        ]
        yield from replan(
            state,
            wanted,
            consolidate=self.consolidate,
            why_stopped="jobs that attained less service need its devices",
        )

    def wake_s(self, state: State) -> float | None:
        """Return when the next running job reaches a threshold, or a waiting one is promoted."""
        times = (
            [self._reaches_s(state, job) for job in state.running.values()] if state.waiting else []
        )
        if self.promote:
            times += [self._promoted_s(job) for job in state.waiting.values()]
        later = [at_s for at_s in times if at_s > state.now_s]
        return min(later, default=None)

    def level(self, state: State, job: JobState) -> int:
        """Return the level of a job now."""
        if self.promote and not job.running and 0 < self._promoted_s(job) <= state.now_s:
            return 0
        attained_s = attained_service_s(job, state.now_s) * (1 + 1e-9)
        threshold_s, level = self.first_s, 0
        while level < self.levels - 1 and attained_s >= threshold_s:
            threshold_s, level = 2 * threshold_s, level + 1
        return level

    def explain(self, state: State, job: JobState) -> str:
        """Return what a job is behind, in words."""
        own = self.level(state, job), job.job.submitted_s
        before = sum(
            (self.level(state, other), other.job.submitted_s) <= own
            for other in state.running.values()
        )
        hours = attained_service_s(job, state.now_s) / 3600
        return (
            f"it attained {hours:.2f} device hours (level {own[0]}); "
            f"{before} running jobs are in a lower level or came earlier"
        )

    def _reaches_s(self, state: State, job: JobState) -> float:
        assert job.slot is not None
        level = self.level(state, job)
        if level == self.levels - 1:
            return state.now_s
        left_s = self.first_s * (1 << level) - attained_service_s(job, state.now_s)
        begin_s = max(state.now_s, job.counted_s)
        return begin_s + left_s * len(job.slot.jobs) / job.slot.shape.devices

    def _promoted_s(self, job: JobState) -> float:
        return job.waiting_since_s + self.promote * job.attained_s / job.job.devices


def attained_service_s(job: JobState, now_s: float) -> float:
    """Return seconds x devices that a job had so far, shared devices divided by their jobs."""
    attained_s = job.attained_s
    if job.slot is not None and now_s > job.counted_s:
        attained_s += (now_s - job.counted_s) * job.slot.shape.devices / len(job.slot.jobs)
    return attained_s
