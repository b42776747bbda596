"""Devices held back for a wide job that jobs which cannot be preempted keep out.

Where all jobs run to their ends, small ones would take each device that becomes free, and a wide
job would wait for ever. The one that has waited longest gets a reservation: the moment at which
enough devices of one type will be free, by the estimated ends of the jobs on them. A job that
cannot be preempted may start before that if it ends in time, or if it takes devices that are spare
at that moment::

    devices  4 | aaaaaaaaaa|WWWWWWWW      W needs all four at `at_s`
             3 | bbbbbb|ccc|WWWWWWWW      c fits in before: backfill
             2 | aaaaaaaaaa|WWWWWWWW
             1 | ddd|      |WWWWWWWW      e, which would last longer, waits
               now        at_s

Jobs that can be preempted start at will: they leave when the moment comes (`put_first`).
Source: D. Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995 (EASY backfill).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.scheduler.planning.candidates import Candidate
    from paceline.scheduler.state.state import Slot, State

_FIRST = 1.01  # of the highest value of a device to any other job


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Devices for a job that waits.

    Attributes:
        name: of the job.
        device_type: of the devices.
        at_s: when enough of them are free, as estimated; infinity if the end of a job is not known.
        spare: devices of the type that are free then and not needed.
    """

    name: str
    device_type: str
    at_s: float
    spare: int


def reserve(
    state: State,
    candidates: Sequence[Candidate],
    capacity: Mapping[str, int],
    pinned: Sequence[Slot],
    before: Reservation | None = None,
) -> Reservation | None:
    """Return the reservation of the job that has waited longest of those kept out, or None.

    A job that has one keeps it to its end: one that can be preempted would lose its devices again.

    Args:
        state: for the time.
        candidates: jobs that may run, without those on pinned devices.
        capacity: devices by type that are not pinned.
        pinned: devices of jobs that cannot be preempted.
        before: the reservation so far.
    """
    waiting = [candidate for candidate in candidates if candidate.job.slot is None]
    kept_out = [c for c in candidates if before is not None and c.job.job.name == before.name] or [
        candidate
        for candidate in waiting
        if all(option.devices > capacity[option.device_type] for option in candidate.options)
    ]
    if not kept_out:
        return None
    first = min(kept_out, key=lambda candidate: candidate.job.waiting_since_s)
    return min(
        (_at(state, first, kind, capacity[kind], pinned) for kind in _kinds(first)),
        key=lambda reservation: reservation.at_s,
    )


def let_in(
    candidates: Sequence[Candidate], reservation: Reservation, now_s: float
) -> list[Candidate]:
    """Return the candidates that do not delay a reservation, the most valuable first to the spare.

    Candidates that run, or can be preempted, are never in its way.
    """
    spare = reservation.spare
    allowed = []
    for candidate in sorted(candidates, key=lambda c: c.density, reverse=True):
        job = candidate.job
        if job.slot is not None or job.job.preemptible or job.job.name == reservation.name:
            allowed.append(candidate)
            continue
        options = [o for o in candidate.options if o.device_type == reservation.device_type]
        slowest_s = max((candidate.left / option.speedup for option in options), default=0.0)
        devices = max((option.devices for option in options), default=0)
        if job.job.work is not None and now_s + slowest_s <= reservation.at_s:
            allowed.append(candidate)
        elif devices <= spare:
            spare -= devices
            allowed.append(candidate)
    return allowed


def put_first(candidates: Sequence[Candidate], reservation: Reservation, now_s: float) -> None:
    """Make a job the most valuable of all when the moment of its reservation has come.

    Otherwise jobs that can be preempted would keep it out, and it those that cannot.
    """
    if reservation.at_s > now_s:
        return
    highest = max(candidate.density for candidate in candidates)
    for candidate in candidates:
        if candidate.job.job.name == reservation.name:
            candidate.raise_worth(_FIRST * highest / candidate.density)


def _kinds(candidate: Candidate) -> list[str]:
    return list(dict.fromkeys(option.device_type for option in candidate.options))


def _at(
    state: State, candidate: Candidate, kind: str, free: int, pinned: Sequence[Slot]
) -> Reservation:
    needed = min(o.devices for o in candidate.options if o.device_type == kind)
    ends = sorted(
        (max(_end_s(state, slot, name) for name in slot.jobs), slot.shape.devices)
        for slot in pinned
        if slot.shape.device_type == kind
    )
    at_s = state.now_s
    for end_s, devices in ends:
        if free >= needed:
            break
        at_s, free = end_s, free + devices
    return Reservation(
        name=candidate.job.job.name, device_type=kind, at_s=at_s, spare=max(0, free - needed)
    )


def _end_s(state: State, slot: Slot, name: str) -> float:
    job = slot.jobs[name]
    left = job.work_left(state.now_s)
    return math.inf if left is None or job.rate <= 0 else state.now_s + left / job.rate
