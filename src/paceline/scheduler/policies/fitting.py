"""Where a job could run: device types by rate, free devices, and why it never fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.scheduler.events import Start
from paceline.scheduler.placement import Placement, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.scheduler.job import Job
    from paceline.scheduler.state.inventory import Parts
    from paceline.scheduler.state.state import JobState, State


class Fit(NamedTuple):
    """Free devices for a job.

    Attributes:
        rate: estimated units of work per second on them.
        parts: the devices.
        shape: of the placement.
    """

    rate: float
    parts: Parts
    shape: Shape


def allowed_types(state: State, job: Job) -> list[str]:
    """Return the device types on which a job may run, in the cluster's order."""
    return [
        kind for kind in state.inventory.free if not job.device_types or kind in job.device_types
    ]


def free_fits(state: State, job: JobState, devices: int) -> Iterator[Fit]:
    """Yield free devices for a job, at most one placement of each device type."""
    for kind in allowed_types(state, job.job):
        parts = state.inventory.find(kind, devices)
        if parts is not None:
            shape = state.inventory.shape(parts)
            rate = state.rates.alone(job.job, shape, job.work_done)
            if rate > 0:
                yield Fit(rate, parts, shape)


def fastest_fit(state: State, job: JobState, devices: int) -> Fit | None:
    """Return the free devices on which a job runs fastest, or None."""
    return max(free_fits(state, job, devices), key=lambda fit: fit.rate, default=None)


def start(state: State, job: JobState, fit: Fit, *, reason: str, rejected: str = "") -> Start:
    """Return the action that starts a job on free devices."""
    placement = Placement(parts=state.inventory.devices(fit.parts))
    return Start(name=job.job.name, placement=placement, reason=reason, rejected=rejected)


def never_fits(state: State, job: Job) -> str:
    """Return why a job can never run on this cluster, in words; empty if it can.

    Nodes that are lost count: they may come back.
    """
    fewest, _ = job.limits
    kinds = allowed_types(state, job)
    if not kinds:
        have = ", ".join(state.inventory.free)
        return f"it asks for {' or '.join(job.device_types)}, the cluster has {have}"
    most = max(state.inventory.total[kind] for kind in kinds)
    if most < fewest:
        return f"it needs {fewest} devices of one type, the cluster has {most}"
    if job.memory_bytes:
        sizes = [node.memory_bytes for node in state.cluster.nodes if node.device_type in kinds]
        if all(size and size < job.memory_bytes for size in sizes):
            return (
                f"it needs {job.memory_bytes / 2**30:.1f} GiB on each device, "
                f"the largest has {max(sizes) / 2**30:.1f} GiB"
            )
    if all(state.rates.alone(job, Shape(kind, (fewest,), 0)) <= 0 for kind in kinds):
        return f"its class '{job.profile}' was never measured on {' or '.join(kinds)}"
    return ""
