"""The one question that policies and the simulator ask of rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape


class Rates(Protocol):
    """Rates of jobs: measured, predicted, or those of a simulated world."""

    @property
    def most_sharing(self) -> int:
        """The most jobs on one set of devices about which these rates say anything."""

    def alone(self, job: Job, shape: Shape, work_done: float = 0.0) -> float:
        """Return units of work per second with the devices for itself; 0 if it cannot run there.

        Args:
            job: whose profile counts.
            shape: of its placement.
            work_done: units of work since its begin: the statistical efficiency of a training
                changes with its progress.
        """

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the share of its rate that a job keeps beside `neighbours` on the same devices.

        0 says that they must not run together, for example because memory does not suffice.
        """

    def constant_until(self, job: Job, work_done: float) -> float:
        """Return the work done at which `alone` changes next; infinity if it does not."""
