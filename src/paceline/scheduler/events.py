"""Events that a scheduler reacts to, and actions that it asks for.

    executor or simulator  --events-->  decide(policy, state, events)  --actions-->  the same

Events of one instant are passed together, so that a policy sees all of a batch of submissions
before it places the first. Actions are carried out in their order: the devices of a job that is
preempted may be given to the next action's job. An executor waits until they are free in fact, and
reports with `Started` when the job began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.record import Record

if TYPE_CHECKING:
    from typing import TypeAlias

from paceline.scheduler.job import Job
from paceline.scheduler.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted(Record):
    """A job was submitted."""

    at_s: float
    job: Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Record):
    """A job that was placed makes progress from now on: only then do its rates count."""

    at_s: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Record):
    """A running job came to its end, well or by its own error."""

    at_s: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped(Record):
    """A running job stopped although nobody asked it to, and can be started anew.

    Attributes:
        work_done: what its last checkpoint holds; None if that is not known.
        reason: in words, for example ``its node was lost``.
    """

    at_s: float
    name: str
    work_done: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled(Record):
    """A job's user withdrew it; if it ran, it has ended."""

    at_s: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(Record):
    """A running job reported its progress.

    Attributes:
        work_done: units of work since the job's begin.
        rate: units of work per second at present; None if it was not measured.
    """

    at_s: float
    name: str
    work_done: float
    rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried(Record):
    """A job as it stood at the end of a log: a new log begins with one for each.

    Attributes:
        placement: where it runs; None if it waits.
        rate, work_done, attained_s, counted_s, waiting_since_s, waited_s, starts, reason: as
            `JobState` has them.
    """

    at_s: float
    job: Job
    placement: Placement | None = None
    rate: float = 0.0
    work_done: float = 0.0
    attained_s: float = 0.0
    counted_s: float = 0.0
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    starts: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rated(Record):
    """The rates of a class of jobs were given, in place of what was known of them.

    Attributes:
        profile: name of the class.
        alone: units of work per second by device type (empty: any) and number of devices.
    """

    at_s: float
    profile: str
    alone: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesLost(Record):
    """Devices of a node failed, not all of it; their jobs are stopped.

    Attributes:
        devices: indices.
        reason: in words.
    """

    at_s: float
    node: str
    devices: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesBack(Record):
    """Lost devices of a node can be used again."""

    at_s: float
    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost(Record):
    """A node failed: `Stopped` events of its jobs come at the same instant, before this one."""

    at_s: float
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBack(Record):
    """A lost node can be used again."""

    at_s: float
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer(Record):
    """The moment came at which the policy wanted to be asked."""

    at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Start(Record):
    """Run a waiting job on these devices.

    Attributes:
        reason: in words.
        rejected: the best alternative that was not chosen, in words; empty if there was none.
    """

    name: str
    placement: Placement
    reason: str = ""
    rejected: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preempt(Record):
    """Stop a running job at a checkpoint; it waits again."""

    name: str
    reason: str = ""
    rejected: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse(Record):
    """Take a job out of the queue: it can never run here."""

    name: str
    reason: str = ""
    rejected: str = ""


Event: TypeAlias = (
    Submitted
    | Started
    | Ended
    | Stopped
    | Cancelled
    | Measured
    | Carried
    | Rated
    | DevicesLost
    | DevicesBack
    | NodeLost
    | NodeBack
    | Timer
)
Action: TypeAlias = Start | Preempt | Refuse
