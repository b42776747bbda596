"""Plans anew who runs where, and carries the plan out with as few restarts as possible.

Preemptive policies order all jobs at every event, the running ones too. The order is tried on a
draft of the cluster on which nothing runs, so that the plan is known before anybody is stopped::

    jobs in order  -->  Draft.place(...)  -->  slots of the draft  -->  carry_out: Preempt, Start
                         a running job takes    compared with the
                         the place it has       slots of the state

A running job takes the place it has if nobody before it in the order took it, unless devices of a
type on which it runs much faster are free. Where devices suffice
and a job still fits nowhere, `replan` tries again with all places new: moving jobs is the price for
whole nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.scheduler.events import Preempt, Start
from paceline.scheduler.policies.fitting import (
    allowed_types,
    best_rate,
    memory_suffices,
    pays_to_move,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.scheduler.events import Action
    from paceline.scheduler.state.inventory import Parts
    from paceline.scheduler.state.state import JobState, Slot, State


class Wanted(NamedTuple):
    """Jobs that shall run on one set of devices.

    Attributes:
        jobs: one, or several that share.
        devices: how many.
        reason: in words.
    """

    jobs: tuple[JobState, ...]
    devices: int
    reason: str


class Drafted(NamedTuple):
    """A wanted group that got its devices in a draft."""

    wanted: Wanted
    parts: Parts


class Draft:
    """The devices of a cluster as if nothing ran, except for jobs that cannot be preempted.

    Attributes:
        placed: groups with devices, in the order in which they were placed.
        skipped: groups that found none.
        fragmented: a group was skipped although as many devices of a type were free.
        fixed: names of the running jobs that keep their devices.
    """

    def __init__(self, state: State, *, consolidate: bool = False, stay: bool = True) -> None:
        """Begin with all devices free.

        Args:
            state: that is planned for; it is not changed.
            consolidate: jobs of up to one node's devices stay in one node, wider ones take whole
                nodes; ignored for a size that the cluster cannot hold so.
            stay: running jobs prefer the devices that they have.
        """
        self.state = state
        self.inventory = state.inventory.emptied()
        self.placed: list[Drafted] = []
        self.skipped: list[Wanted] = []
        self.fragmented = False
        self.fixed: set[str] = set()
        self._consolidate = consolidate
        self._stay = stay
        self._consolidated: dict[tuple[str, int], bool] = {}
        for slot in state.slots.values():
            members = tuple(slot.jobs.values())
            if not all(job.job.preemptible for job in members):
                self._take(
                    Wanted(members, slot.shape.devices, "it cannot be preempted"), slot.parts
                )
                self.fixed.update(slot.jobs)

    @property
    def free(self) -> int:
        """Free devices of all types."""
        return sum(self.inventory.free.values())

    def place(self, wanted: Wanted) -> bool:
        """Give a group its devices; return whether there were any."""
        parts = self._present(wanted) if self._stay else None
        if parts is None:
            parts = self._find(wanted)
        elif len(allowed_types(self.state, wanted.jobs[0].job)) > 1:
            faster = self._find(wanted)
            if faster is not None and self._pays_to_move(wanted, parts, faster):
                parts = faster
        if parts is None:
            self.skipped.append(wanted)
            kinds = allowed_types(self.state, wanted.jobs[0].job)
            self.fragmented |= any(self.inventory.free[kind] >= wanted.devices for kind in kinds)
            return False
        self._take(wanted, parts)
        return True

    def _take(self, wanted: Wanted, parts: Parts) -> None:
        self.inventory.take(parts)
        self.placed.append(Drafted(wanted, parts))

    def _present(self, wanted: Wanted) -> Parts | None:
        """Return the devices on which most of the group runs, if they are free here."""
        slots: dict[Parts, Slot] = {}
        for job in wanted.jobs:
            slot = job.slot
            if slot is not None and slot.shape.devices == wanted.devices and self._free(slot.parts):
                slots[slot.parts] = slot
        best = max(
            slots.values(),
            key=lambda slot: sum(job.job.name in slot.jobs for job in wanted.jobs),
            default=None,
        )
        return best.parts if best is not None and self._value(wanted, best.parts) > 0 else None

    def _free(self, parts: Parts) -> bool:
        return all(self.inventory.free_bits[index] & bits == bits for index, bits in parts)

    def _find(self, wanted: Wanted) -> Parts | None:
        """Return the free devices on which a group runs fastest, relative to its jobs alone."""
        found: tuple[float, Parts] | None = None
        for kind in allowed_types(self.state, wanted.jobs[0].job):
            parts = self._find_type(kind, wanted)
            if parts is None:
                continue
            value = self._value(wanted, parts)
            if value > 0 and (found is None or value > found[0]):
                found = value, parts
        return found[1] if found else None

    def _find_type(self, kind: str, wanted: Wanted) -> Parts | None:
        devices = wanted.devices
        prefer = self.state.data_nodes.get(wanted.jobs[0].job.dataset, {})
        if not self._consolidate:
            return self.inventory.find(kind, devices, prefer=prefer)
        level = self._consolidated_level(kind, devices)
        parts = self.inventory.find(kind, devices, max_level=level, prefer=prefer)
        if parts is None and devices <= self.inventory.free[kind]:
            fits = self._consolidated.get((kind, devices))
            if fits is None:
                empty = self.state.inventory.emptied()
                fits = empty.find(kind, devices, max_level=level) is not None
                self._consolidated[kind, devices] = fits
            if not fits:
                return self.inventory.find(kind, devices, prefer=prefer)
        return parts

    def _consolidated_level(self, kind: str, devices: int) -> int:
        inventory = self.inventory
        if devices <= inventory.largest_node[kind]:
            return 0
        return max(1, max(len(node.switches) for node in inventory.nodes))

    def _pays_to_move(self, wanted: Wanted, present: Parts, faster: Parts) -> bool:
        gain = self._value(wanted, faster) / self._value(wanted, present)
        return all(
            pays_to_move(self.state, job, gain * job.rate) for job in wanted.jobs if job.running
        )

    def _value(self, wanted: Wanted, parts: Parts) -> float:
        """Return the sum of the jobs' rates, each relative to its best alone; 0 if one has none."""
        shape = self.inventory.shape(parts)
        total = 0.0
        if not memory_suffices(self.state, [job.job for job in wanted.jobs], shape.device_type):
            return 0.0
        for job in wanted.jobs:
            if job.job.device_types and shape.device_type not in job.job.device_types:
                return 0.0
            others = [other.job for other in wanted.jobs if other is not job]
            rate = self.state.rate_of(job, shape, others)
            if rate <= 0:
                return 0.0
            total += rate / best_rate(self.state, job, wanted.devices)
        return total


def replan(
    state: State, wanted: Sequence[Wanted], *, consolidate: bool = False, why_stopped: str
) -> Iterator[Action]:
    """Yield what turns the running jobs into those of a list, as far as they fit.

    Args:
        state: may be read only.
        wanted: groups in the order of their right to devices; one that does not fit is passed
            over.
        consolidate: see `Draft`.
        why_stopped: reason for which running jobs that got no devices are preempted, in words.
    """
    draft = fill(Draft(state, consolidate=consolidate), wanted)
    if draft.fragmented:
        moved = fill(Draft(state, consolidate=consolidate, stay=False), wanted)
        first, second = _first_skipped(draft, wanted), _first_skipped(moved, wanted)
        draft = moved if second > first else draft
    yield from carry_out(state, draft, why_stopped=why_stopped)


def fill(draft: Draft, wanted: Iterable[Wanted]) -> Draft:
    """Place groups in order until no device is left; return the draft."""
    for group in wanted:
        if draft.fixed and any(job.job.name in draft.fixed for job in group.jobs):
            continue
        if draft.free:
            draft.place(group)
        else:
            draft.skipped.append(group)
            return draft
    return draft


def _first_skipped(draft: Draft, wanted: Sequence[Wanted]) -> int:
    if not draft.skipped:
        return len(wanted)
    return wanted.index(draft.skipped[0])


def carry_out(state: State, draft: Draft, *, why_stopped: str) -> Iterator[Action]:
    """Yield the preemptions and starts that lead from the running jobs to a draft."""
    target = {job.job.name: entry for entry in draft.placed for job in entry.wanted.jobs}
    for name, job in list(state.running.items()):
        entry = target.get(name)
        if entry is None:
            yield Preempt(name=name, reason=why_stopped)
        elif job.slot is not None and job.slot.parts != entry.parts:
            yield Preempt(name=name, reason="it moves, so that another job fits beside it")
    rejected = _rejected(draft)
    for entry in draft.placed:
        for job in entry.wanted.jobs:
            if not job.running:
                placement = state.placement(job.job, entry.parts, jobs=len(entry.wanted.jobs))
                yield Start(
                    name=job.job.name,
                    placement=placement,
                    reason=entry.wanted.reason,
                    rejected=rejected,
                )


def _rejected(draft: Draft) -> str:
    if not draft.skipped:
        return ""
    wanted = draft.skipped[0]
    names = ", ".join(job.job.name for job in wanted.jobs)
    return f"{names} on {wanted.devices} devices: {wanted.reason}"
