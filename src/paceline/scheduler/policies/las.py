"""Least attained service in discrete levels (Tiresias): no durations needed.

A job's attained service is time x devices. Jobs that attained little run first; levels keep jobs
that attained about the same from preempting one another all the time::

    level = number of thresholds that the service reached:  first, 2 first, 4 first, ...
    order = (level, order of the first submission)

A job that waited longer than `promote` times what it ran counts as new, so that none starves. At
the limit of many levels and a small first threshold this is processor sharing, with one level it is
first in, first out with backfill.
Source: J. Gu et al., Tiresias: A GPU Cluster Manager for Distributed Deep Learning, NSDI 2019,
section 3 (discretized 2D-LAS, PROMOTEKNOB). Its simulator has two thresholds, about one and two
device hours; more levels suit queues whose jobs differ more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.report.units import plural
from paceline.scheduler.policies.fitting import refuse_unfit, rigid_size
from paceline.scheduler.policies.replan import Wanted, replan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import JobState, State


@dataclass(slots=True)
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
    _forgotten_s: dict[str, float] = field(default_factory=dict)  # service before a promotion

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield what makes the jobs of the lowest levels run."""
        yield from refuse_unfit(state, events)
        self._promote(state)
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
        times: list[float] = []
        if state.waiting:
            times += [self._reaches_s(state, job) for job in state.running.values()]
        if self.promote:
            times += [self._promoted_s(job) for job in state.waiting.values()]
        later = [at_s for at_s in times if at_s > state.now_s]
        return min(later, default=None)

    def level(self, state: State, job: JobState) -> int:
        """Return the level of a job now."""
        attained_s = self._counted_s(state, job) * (1 + 1e-9)
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
            f"{plural(before, 'running job')} of a lower level or an earlier submission"
        )

    def _reaches_s(self, state: State, job: JobState) -> float:
        assert job.slot is not None
        level = self.level(state, job)
        if level == self.levels - 1:
            return state.now_s
        left_s = self.first_s * (1 << level) - self._counted_s(state, job)
        begin_s = max(state.now_s, job.counted_s)
        return begin_s + left_s * len(job.slot.jobs) / job.slot.shape.devices

    def _promote(self, state: State) -> None:
        """Forget the service of jobs that waited too long, and of those that are gone."""
        if not self.promote:
            return
        for name, job in state.waiting.items():
            if self._promoted_s(job) <= state.now_s:
                self._forgotten_s[name] = job.attained_s
        for name in [name for name in self._forgotten_s if state.job(name) is None]:
            del self._forgotten_s[name]

    def _promoted_s(self, job: JobState) -> float:
        """Return when a waiting job counts as new."""
        counted_s = job.attained_s - self._forgotten_s.get(job.job.name, 0.0)
        return job.waiting_since_s + self.promote * counted_s / job.job.devices

    def _counted_s(self, state: State, job: JobState) -> float:
        """Return the service since the last promotion."""
        return attained_service_s(job, state.now_s) - self._forgotten_s.get(job.job.name, 0.0)


def attained_service_s(job: JobState, now_s: float) -> float:
    """Return seconds x devices that a job had so far, shared devices divided by their jobs."""
    attained_s = job.attained_s
    if job.slot is not None and now_s > job.counted_s:
        attained_s += (now_s - job.counted_s) * job.slot.shape.devices / len(job.slot.jobs)
    return attained_s
