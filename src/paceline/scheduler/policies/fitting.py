"""Where a job could run: device types by rate, free devices, and why it never fits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from paceline.scheduler.events import Refuse, Start, Submitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape
    from paceline.scheduler.state.inventory import Parts
    from paceline.scheduler.state.state import JobState, Slot, State


MOVE_GAIN = 1.25


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
        kind
        for kind in state.inventory.free
        if (not job.device_types or kind in job.device_types)
        and memory_suffices(state, (job,), kind)
    ]


def memory_suffices(state: State, jobs: Sequence[Job], device_type: str) -> bool:
    """Return whether jobs fit together into the memory of a device, as far as it is known."""
    needed = sum(job.memory_bytes for job in jobs)
    return state.inventory.memory_suffices(needed, device_type)


def rigid_size(state: State, job: Job) -> int:
    """Return the devices that a policy gives a job which does not choose sizes.

    It is what the user asked for, or the most that the job and a type allow if that is less.
    """
    most = max((state.inventory.total[kind] for kind in allowed_types(state, job)), default=0)
    return min(job.devices, max(most, job.limits[0]))


def free_fits(
    state: State, job: JobState, devices: int, *, whole_nodes: bool = False
) -> Iterator[Fit]:
    """Yield free devices for a job, at most one placement of each device type.

    Args:
        state: may be read only.
        job: that waits.
        devices: how many.
        whole_nodes: only on nodes of which nobody holds a device.
    """
    for kind in allowed_types(state, job.job):
        if whole_nodes:
            parts = state.inventory.find_whole(kind, devices)
        else:
            parts = state.find(job.job, kind, devices)
        if parts is not None:
            shape = state.inventory.shape(parts)
            rate = state.rates.alone(job.job, shape, job.work_done)
            if rate > 0:
                yield Fit(rate, parts, shape)


def fastest_fit(
    state: State, job: JobState, devices: int, *, whole_nodes: bool = False
) -> Fit | None:
    """Return the free devices on which a job runs fastest, or None; see `free_fits`."""
    fits = free_fits(state, job, devices, whole_nodes=whole_nodes)
    return max(fits, key=lambda fit: fit.rate, default=None)


def best_rate(state: State, job: JobState, devices: int) -> float:
    """Return the rate of a job on the fastest type that has so many devices; 0 if none has."""
    return max(
        (
            state.rates.alone(job.job, state.inventory.closest(kind, devices), job.work_done)
            for kind in allowed_types(state, job.job)
            if devices <= state.inventory.total[kind]
        ),
        default=0.0,
    )


def time_left_s(state: State, job: JobState) -> float:
    """Return the seconds that a job would still run alone; infinity if its work is not known."""
    left = job.work_left(state.now_s)
    rate = best_rate(state, job, rigid_size(state, job.job))
    return math.inf if left is None or rate <= 0 else left / rate


def pays_to_move(state: State, job: JobState, rate: float) -> bool:
    """Return whether a running job should move to where it has another rate.

    It should if the rate is `MOVE_GAIN` times its own, and the time saved twice that of a restart.
    """
    if rate <= MOVE_GAIN * job.rate:
        return False
    left = job.work_expected(state.now_s)
    if job.rate <= 0:
        return True
    return left / job.rate - left / rate > 2 * job.job.restart_s


def start(state: State, job: JobState, fit: Fit, *, reason: str, rejected: str = "") -> Start:
    """Return the action that starts a job on free devices."""
    placement = state.placement(job.job, fit.parts)
    return Start(name=job.job.name, placement=placement, reason=reason, rejected=rejected)


def join(state: State, job: JobState, slot: Slot, *, reason: str) -> Start:
    """Return the action that starts a job beside those on some devices."""
    placement = state.placement(job.job, slot.parts, jobs=len(slot.jobs) + 1)
    return Start(name=job.job.name, placement=placement, reason=reason)


def refuse_unfit(
    state: State, events: Sequence[Event], forbidden: Callable[[Job], str] = lambda job: ""
) -> Iterator[Action]:
    """Yield the refusal of each job that was just submitted and can never run.

    Args:
        state: may be read only.
        events: of this instant.
        forbidden: returns why the policy would never start a job that fits; empty if it would.
    """
    for event in events:
        if isinstance(event, Submitted) and event.job.name in state.waiting:
            reason = never_fits(state, event.job) or forbidden(event.job)
            if reason:
                yield Refuse(name=event.job.name, reason=reason)


def never_fits(state: State, job: Job) -> str:
    """Return why a job can never run on this cluster, in words; empty if it can.

    Nodes that are lost count: they may come back.
    """
    fewest, _ = job.limits
    inventory = state.inventory
    kinds = [kind for kind in inventory.total if not job.device_types or kind in job.device_types]
    if not kinds:
        have = ", ".join(inventory.total)
        return f"it asks for {' or '.join(job.device_types)}, the cluster has {have}"
    sizes = [inventory.memory_bytes[kind] for kind in kinds]
    kinds = [kind for kind in kinds if memory_suffices(state, (job,), kind)]
    if not kinds:
        return (
            f"it needs {job.memory_bytes / 2**30:.1f} GiB on each device, "
            f"the largest has {max(sizes) / 2**30:.1f} GiB"
        )
    most = max(inventory.total[kind] for kind in kinds)
    if most < fewest:
        return f"it needs {fewest} devices of one type, the cluster has {most}"
    kinds = [kind for kind in kinds if inventory.total[kind] >= fewest]
    if all(state.rates.alone(job, inventory.closest(kind, fewest)) <= 0 for kind in kinds):
        return f"its class '{job.profile}' was never measured on {' or '.join(kinds)}"
    return ""
