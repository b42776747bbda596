"""When the tensors that a plan spills are written and read, and what that costs.

Both questions are answered for a fixed choice of tensors. `transfers` depends on the order of
events alone: a tensor must be written by the event at which the memory is needed, and it is read
from the first event on at which it fits. So the budget holds however slow the disk is: a slow disk
makes the step wait. `replay` adds times, and predicts how long.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.schedules.memory.records import TensorAction

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.schedules.memory.records import SpillTier, StepProfile

ROUNDS = 3  # replayed; the last is like all that follow


class ReplayedInterval(NamedTuple):
    """What follows an event of a step.

    Attributes:
        begin_s: when the step goes on after the event, from the begin of the step.
        waited_s: seconds that it waited for transfers before that.
        bytes: most memory until the next event.
    """

    begin_s: float
    waited_s: float
    bytes: int


class TensorTransfer(NamedTuple):
    """A tensor on its way to the tier or back, from the begin of the step; it may end after it."""

    tensor: int
    is_write: bool
    begin_s: float
    end_s: float


class Replayed(NamedTuple):
    """A step as it is predicted.

    Attributes:
        step_s: seconds of the step.
        exposed_s: seconds in which it waits for transfers.
        peak_bytes: most memory in any interval.
        intervals: by event.
        transfers: in the order in which they begin; those of the step before that end in this one
            begin before 0.
    """

    step_s: float
    exposed_s: float
    peak_bytes: int
    intervals: tuple[ReplayedInterval, ...] = ()
    transfers: tuple[TensorTransfer, ...] = ()


def resident_bytes(
    profile: StepProfile, kept: Collection[int], recomputed: Collection[int] = ()
) -> np.ndarray:
    """Return the least memory in each interval, shape (events,).

    Args:
        profile: of the step.
        kept: indices of the tensors that stay in memory.
        recomputed: indices of the modules whose tensors are computed again.
    """
    resident = np.asarray(profile.floor_bytes, dtype=np.int64).copy()
    for i in kept:
        tensor = profile.tensors[i]
        add(resident, tensor.idle, tensor.needed, tensor.bytes)
    for i in recomputed:
        module = profile.modules[i]
        for member in module.tensors:  # all come back at once
            tensor = profile.tensors[member]
            add(resident, module.needed, tensor.needed, tensor.bytes)
    return resident


def add(resident: np.ndarray, begin: int, end: int, count: int) -> None:
    """Add bytes to the intervals from `begin` to before `end`; negative ones are a step before."""
    if begin < 0:
        resident[begin:] += count
        if end < 0:
            resident[end:] -= count
        begin, end = 0, max(end, 0)
    resident[begin:end] += count


def transfers(
    profile: StepProfile,
    kept: Collection[int],
    budget_bytes: int,
    recomputed: Collection[int] = (),
) -> tuple[TensorAction, ...] | None:
    """Return the action of every tensor; None where the budget does not hold.

    Args:
        profile: of the step.
        kept: indices of the tensors that stay in memory; the others are spilled.
        budget_bytes: of the process.
        recomputed: indices of the modules whose tensors are neither kept nor spilled.
    """
    resident = resident_bytes(profile, kept, recomputed)
    if resident.max(initial=0) > budget_bytes:
        return None
    again = {member for i in recomputed for member in profile.modules[i].tensors}
    spilled = [i for i in range(len(profile.tensors)) if i not in kept and i not in again]
    written_by = _write_deadlines(profile, spilled, resident, budget_bytes)
    read_at = _read_starts(profile, spilled, written_by, resident, budget_bytes)
    plain = {**dict.fromkeys(kept, "keep"), **dict.fromkeys(again, "recompute")}
    return tuple(
        TensorAction("spill", written_by[i], read_at[i])
        if i in written_by
        else TensorAction("recompute" if plain[i] == "recompute" else "keep", 0, tensor.needed)
        for i, tensor in enumerate(profile.tensors)
    )


def _write_deadlines(
    profile: StepProfile, spilled: Sequence[int], resident: np.ndarray, budget_bytes: int
) -> dict[int, int]:
    """Return by which event each tensor must be written; adds the tensors on their way.

    Tensors are written in the order in which they were saved. Each one may wait for as long as
    there is room for it and those behind it.
    """
    events = profile.events
    tensors = profile.tensors
    by_idle = collections.defaultdict(list)
    by_saved = collections.defaultdict(list)
    by_needed = collections.defaultdict(list)
    for i in spilled:
        by_idle[tensors[i].idle].append(i)
        by_saved[tensors[i].saved].append(i)
        by_needed[tensors[i].needed].append(i)
    queue: collections.OrderedDict[int, int] = collections.OrderedDict()  # bytes that it takes
    deadlines: dict[int, int] = {}
    pending = 0
    for at in range(min(by_saved, default=0), events):
        for i in by_saved[at]:
            queue[i] = 0
        for i in by_needed[at]:
            if i in queue:
                pending -= queue.pop(i)
                deadlines[i] = at
        for i in by_idle[at]:
            if i in queue:
                queue[i] = tensors[i].bytes
                pending += queue[i]
        while queue and resident[at % events] + pending > budget_bytes:
            oldest, size = queue.popitem(last=False)
            pending -= size
            deadlines[oldest] = at
        resident[at % events] += pending
    return deadlines


def _read_starts(
    profile: StepProfile,
    spilled: Sequence[int],
    written_by: dict[int, int],
    resident: np.ndarray,
    budget_bytes: int,
) -> dict[int, int]:
    """Return at which event reading each tensor starts: the first at which all fit until needed."""
    starts: dict[int, int] = {}
    previous = 0
    for i in sorted(spilled, key=lambda i: profile.tensors[i].needed):
        tensor = profile.tensors[i]
        earliest = min(max(written_by[i], previous, 0), tensor.needed)
        window = resident[earliest : tensor.needed]
        full = np.flatnonzero(window + tensor.bytes > budget_bytes)
        start = earliest + (int(full[-1]) + 1 if len(full) else 0)
        add(resident, start, tensor.needed, tensor.bytes)
        starts[i] = previous = start
    return starts


class _Queues:
    """The times at which the disk is done with writes and reads; each kind goes in order."""

    def __init__(self, tier: SpillTier) -> None:
        self.tier = tier
        self.written_s = self.read_s = 0.0
        self.ends: dict[int, float] = {}  # of the last transfer of a tensor
        self.transfers: list[TensorTransfer] = []

    def write(self, index: int, size_bytes: int, now_s: float) -> None:
        begin = max(self.written_s, now_s)
        self.written_s = self.ends[index] = begin + size_bytes / self.tier.write_bytes_per_s
        self.transfers.append(TensorTransfer(index, True, begin, self.written_s))

    def read(self, index: int, size_bytes: int, now_s: float) -> None:
        begin = max(self.read_s, now_s, self.ends.get(index, 0.0))
        self.read_s = self.ends[index] = begin + size_bytes / self.tier.read_bytes_per_s
        self.transfers.append(TensorTransfer(index, False, begin, self.read_s))

    def transfers_from(self, begin_s: float) -> tuple[TensorTransfer, ...]:
        """Return the transfers that end later than a time, from that time on."""
        return tuple(
            move._replace(begin_s=move.begin_s - begin_s, end_s=move.end_s - begin_s)
            for move in self.transfers
            if move.end_s > begin_s
        )


def replay(
    profile: StepProfile,
    actions: Sequence[TensorAction],
    tier: SpillTier,
    recomputed: Collection[int] = (),
) -> Replayed:
    """Predict a step under a plan's actions.

    Transfers run beside the computing, writes and reads each in their order; the step waits at the
    events at which the plan says so. The cores' part in the transfers slows the computing down.

    Args:
        profile: of the step.
        actions: of its tensors.
        tier: where spilled tensors go.
        recomputed: indices of the modules that are computed again.
    """
    events = profile.events
    tensors = profile.tensors
    spilled = [i for i, action in enumerate(actions) if action.action == "spill"]
    saved, due, started, needed = (
        _by_event(spilled, [at % events for at in of])
        for of in (
            [tensors[i].saved for i in spilled],
            [actions[i].written_by for i in spilled],
            [actions[i].read_at for i in spilled],
            [tensors[i].needed for i in spilled],
        )
    )
    again: dict[int, float] = collections.defaultdict(float)
    for i in recomputed:
        again[profile.modules[i].needed] += profile.modules[i].compute_s
    moved = sum(tensors[i].bytes for i in spilled)
    slowed = 1 + moved * tier.cpu_s_per_byte / tier.cores / max(profile.step_s, 1e-9)
    kept = [i for i, action in enumerate(actions) if action.action == "keep"]
    base = resident_bytes(profile, kept, recomputed)
    queues = _Queues(tier)
    now = exposed = begin = 0.0
    peak = 0
    pending: set[int] = set()
    reading: set[int] = set()
    intervals: list[ReplayedInterval] = []
    for _ in range(ROUNDS):
        begin, exposed, peak = now, 0.0, 0
        intervals.clear()
        for event in range(events):
            for i in saved[event]:
                queues.write(i, tensors[i].bytes, now)
                pending.add(i)
            waited = max([now, *(queues.ends.get(i, 0.0) for i in due[event] if i in pending)])
            for i in started[event]:
                queues.read(i, tensors[i].bytes, waited)
                pending.discard(i)
                reading.add(i)
            waited = max([waited, *(queues.ends[i] for i in needed[event])])
            exposed += waited - now
            waited_s, now = waited - now, waited
            reading.difference_update(needed[event])
            pending = {i for i in pending if queues.ends[i] > now}
            # Before `idle` a tensor that waits to be written is in the floor already.
            moving = sum(
                tensors[i].bytes
                for i in pending
                if (event - tensors[i].idle) % events < (tensors[i].needed - tensors[i].idle)
            ) + sum(tensors[i].bytes for i in reading)
            peak = max(peak, int(base[event]) + moving)
            intervals.append(ReplayedInterval(now - begin, waited_s, int(base[event]) + moving))
            now += (profile.compute_s[event] + again[event]) * slowed
    return Replayed(now - begin, exposed, peak, tuple(intervals), queues.transfers_from(begin))


def _by_event(indices: Sequence[int], events: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = collections.defaultdict(list)
    for i, event in zip(indices, events, strict=True):
        found[event].append(i)
    return found
