"""First in, first out, devices exclusive: what a batch system does without backfill.

Jobs start in the order in which they came. The first that does not fit blocks those behind it, so
that no job waits for ever; the devices that stay idle meanwhile are the price.
Source: the default of batch systems; Slurm with ``SchedulerType=sched/builtin``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.scheduler.policies.fitting import fastest_fit, start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import State


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out.

    Attributes:
        whole_nodes: give each job its nodes alone, as batch systems of supercomputers do.
    """

    whole_nodes: bool = False
    name: str = "fifo"

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield a start for each job at the head of the queue that fits."""
        while state.waiting:
            job = next(iter(state.waiting.values()))
            fit = fastest_fit(state, job, job.job.devices)
            if fit is None:
                return
            yield start(state, job, fit, reason="it is the first in the queue and fits")

    def wake_s(self, state: State) -> float | None:
        """Return None: only events matter."""
        return None
