"""First in, first out, devices exclusive: what a batch system does without backfill.

Jobs start in the order in which they came. The first that does not fit blocks those behind it, so
that no job waits for ever; the devices that stay idle meanwhile are the price.
With `whole_nodes` a job has its nodes alone although it uses fewer of their devices, as on most
supercomputers.
Source: the default of batch systems; Slurm with ``SchedulerType=sched/builtin``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.report.units import plural
from paceline.scheduler.policies.fitting import (
    fastest_fit,
    refuse_unfit,
    rigid_size,
    start,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import JobState, State


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out.

    Attributes:
        whole_nodes: give each job its nodes alone, as batch systems of supercomputers do.
        near: give a job devices as close together as they can be, or none.
    """

    whole_nodes: bool = False
    near: bool = False

    @property
    def name(self) -> str:
        """``fifo-nodes`` if nodes are given whole, else ``fifo``."""
        return "fifo-nodes" if self.whole_nodes else "fifo"

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield a start for each job at the head of the queue that fits."""
        yield from refuse_unfit(state, events)
        while state.waiting:
            job = next(iter(state.waiting.values()))
            fit = fastest_fit(state, job, rigid_size(state, job.job), whole_nodes=self.whole_nodes)
            if fit is None or (self.near and not state.inventory.is_close(fit.shape)):
                return
            yield start(state, job, fit, reason="it is the first in the queue and fits")

    def explain(self, state: State, job: JobState) -> str:
        """Return what a job is behind, in words."""
        before = list(state.waiting).index(job.job.name)
        if not before:
            return "it is the first in the queue"
        first = next(iter(state.waiting.values())).job
        return (
            f"{plural(before, 'job')} before it in the queue; the first, {first.name}, waits for "
            f"{plural(first.devices, 'device')}"
        )

    def wake_s(self, state: State) -> float | None:
        """Return None: only events matter."""
        return None
