"""Shortest remaining time first, preemptive; or shortest remaining service.

At every event the jobs with the least left run::

    srtf     time left = work left / rate alone on the fastest type
    srsf     service left = time left x devices

One that does not fit is passed over by shorter ones behind it (backfill). A job whose work is not
known comes last, in the order of submission. Optimal for the mean completion time on one device;
long jobs can wait for ever under load.
Source: L. Schrage, A Proof of the Optimality of the Shortest Remaining Processing Time Discipline,
Operations Research 16, 1968; SRSF: J. Gu et al., Tiresias, NSDI 2019, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.report.units import plural
from paceline.scheduler.policies.fitting import refuse_unfit, rigid_size, time_left_s
from paceline.scheduler.policies.replan import Wanted, replan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import JobState, State


@dataclass(frozen=True, slots=True)
class ShortestRemaining:
    """The jobs with the least left run.

    Attributes:
        service: count devices x time instead of time.
        consolidate: keep jobs within nodes, see `Draft`.
    """

    service: bool = False
    consolidate: bool = False

    @property
    def name(self) -> str:
        """``srsf`` by service, else ``srtf``."""
        return "srsf" if self.service else "srtf"

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield what makes the jobs with the least left run."""
        yield from refuse_unfit(state, events)
        left = {
            job: self.left(state, job) for job in (*state.running.values(), *state.waiting.values())
        }
        order = sorted(left, key=lambda job: (left[job], job.job.submitted_s))
        wanted = [
            Wanted(
                (job,),
                rigid_size(state, job.job),
                f"{self._words(left[job])}, rank {rank} of {len(order)}",
            )
            for rank, job in enumerate(order, 1)
        ]
        yield from replan(
            state, wanted, consolidate=self.consolidate, why_stopped="jobs with less left need it"
        )

    def wake_s(self, state: State) -> float | None:
        """Return None: between events the running jobs only come closer to their end."""
        return None

    def left(self, state: State, job: JobState) -> float:
        """Return seconds, or seconds x devices, that a job still needs."""
        return time_left_s(state, job) * (rigid_size(state, job.job) if self.service else 1)

    def explain(self, state: State, job: JobState) -> str:
        """Return what a job is behind, in words."""
        own = self.left(state, job)
        before = sum(self.left(state, other) <= own for other in state.running.values())
        return f"{self._words(own)}; less is left of {plural(before, 'running job')}"

    def _words(self, left: float) -> str:
        if left == float("inf"):
            return "its work is not known"
        return f"{left / 3600:.2f} {'device hours' if self.service else 'h'} left"
