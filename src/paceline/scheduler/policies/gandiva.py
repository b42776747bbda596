"""Packing by trial (Gandiva): jobs share devices, and are parted where the measured total falls.

Jobs start in the order of submission on devices of their own. While some wait, the first of them is
packed on the devices of a running job with as many devices, the one that packed best so far, else
the one with the fewest trials. Nothing is predicted; after each `trial_s` the pair is measured::

    total = sum over the pair of (measured rate / rate alone)
    kept while total > 1; after `slow` measurements at or below 1 the later job is taken off

and the pair of classes is remembered, so that it is not tried again. Memory that would not suffice
is respected, as Gandiva's jobs would fail. While nobody waits, jobs migrate to free devices on
which they run much faster. Time slicing is left out.
Source: W. Xiao et al., Gandiva: Introspective Cluster Scheduling for Deep Learning, OSDI 2018,
sections 3 and 4.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paceline.report.units import plural
from paceline.scheduler.events import Preempt
from paceline.scheduler.policies.fitting import (
    allowed_types,
    fastest_fit,
    join,
    memory_suffices,
    pays_to_move,
    refuse_unfit,
    rigid_size,
    start,
)
from paceline.scheduler.state.inventory import Parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import JobState, Slot, State

_Pair: TypeAlias = tuple[str, str, str]  # device type, and two classes in order


@dataclass(slots=True)
class _Trial:
    """Two jobs that share devices since `began_s`."""

    names: frozenset[str]
    measured_s: float
    slow: int = 0


@dataclass(slots=True)
class Gandiva:
    """Packs waiting jobs beside running ones and keeps what pays.

    Attributes:
        trial_s: seconds between two measurements of a pair.
        slow: measurements after which a pair that does not pay is parted.
    """

    trial_s: float = 300.0
    slow: int = 3
    name: str = "gandiva"
    _trials: dict[Parts, _Trial] = field(default_factory=dict)
    _refused: set[_Pair] = field(default_factory=set)
    _tried: Counter[_Pair] = field(default_factory=Counter)
    _totals: dict[_Pair, float] = field(default_factory=dict)

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield the end of trials that failed, starts on free devices, and new trials."""
        yield from refuse_unfit(state, events)
        parted = []
        for slot in self._measure(state):
            later = max(slot.jobs.values(), key=lambda job: (job.waiting_since_s, job.job.name))
            if later.job.preemptible:
                parted.append(later.job.name)
                yield Preempt(name=later.job.name, reason=self._words(state, slot))
        blocked = False
        for name, job in list(state.waiting.items()):
            fit = None if blocked else fastest_fit(state, job, rigid_size(state, job.job))
            if fit is not None:
                yield start(state, job, fit, reason="it is the first in the queue and fits")
                continue
            blocked = True
            if name in parted:
                continue
            best = max(
                (slot for slot in state.slots.values() if self._may_try(state, job, slot)),
                key=lambda slot: self._hope(job, slot),
                default=None,
            )
            if best is not None:
                (other,) = best.jobs
                pair = _pair(job, best)
                self._tried[pair] += 1
                self._trials[best.parts] = _Trial(frozenset({name, other}), state.now_s)
                yield join(state, job, best, reason=f"no devices are free; tried beside {other}")
        if not state.waiting:
            yield from self._migrate(state)

    def wake_s(self, state: State) -> float | None:
        """Return when the next pair is measured."""
        times = [
            trial.measured_s + self.trial_s
            for parts, trial in self._trials.items()
            if self._lasts(state, parts)
        ]
        return max(min(times), state.now_s + 1e-3) if times else None

    def explain(self, state: State, job: JobState) -> str:
        """Return how many running jobs it could be packed with, in words."""
        size = rigid_size(state, job.job)
        same = [s for s in state.slots.values() if s.shape.devices == size]
        refused = sum(len(s.jobs) == 1 and _pair(job, s) in self._refused for s in same)
        shared = sum(len(s.jobs) > 1 for s in same)
        return (
            f"{plural(len(same), 'slot')} of {plural(size, 'device')}: {shared} shared already, "
            f"{refused} with a job whose class did not pay beside it"
        )

    def _migrate(self, state: State) -> Iterator[Action]:
        """Move jobs to free devices on which they run much faster, shared ones first."""
        running = sorted(state.running.values(), key=lambda job: -len(job.neighbours))
        for job in running:
            slot = job.slot
            if slot is None or not job.job.preemptible:
                continue
            fit = fastest_fit(state, job, slot.shape.devices)
            if fit is not None and pays_to_move(state, job, fit.rate):
                yield Preempt(name=job.job.name, reason="it moves to faster devices")
                yield start(state, job, fit, reason="nobody waits, and these devices are faster")

    def _measure(self, state: State) -> list[Slot]:
        """Measure the pairs whose time came, and return those to be parted."""
        failed = []
        for parts, trial in list(self._trials.items()):
            if not self._lasts(state, parts):
                del self._trials[parts]
                continue
            if state.now_s < trial.measured_s + self.trial_s * (1 - 1e-9):
                continue
            slot = state.slots[parts]
            total = self._total(state, slot)
            first, second = slot.jobs.values()
            pair = _classes(slot.shape.device_type, first, second)
            self._totals[pair] = total
            trial.measured_s = state.now_s
            trial.slow = trial.slow + 1 if total <= 1 else 0
            if trial.slow >= self.slow:
                self._refused.add(pair)
                del self._trials[parts]
                failed.append(slot)
        return failed

    def _lasts(self, state: State, parts: Parts) -> bool:
        slot = state.slots.get(parts)
        return slot is not None and slot.jobs.keys() == self._trials[parts].names

    def _total(self, state: State, slot: Slot) -> float:
        return sum(
            job.rate / state.rates.alone(job.job, slot.shape, job.work_done)
            for job in slot.jobs.values()
        )

    def _words(self, state: State, slot: Slot) -> str:
        total = self._total(state, slot)
        return f"sharing gave a total of {total:.2f} of the rates alone, {self.slow} times"

    def _may_try(self, state: State, job: JobState, slot: Slot) -> bool:
        kind, size = slot.shape.device_type, rigid_size(state, job.job)
        if len(slot.jobs) != 1 or slot.shape.devices != size or not job.job.shares:
            return False
        if kind not in allowed_types(state, job.job):
            return False
        (other,) = slot.jobs.values()
        return (
            other.job.shares
            and memory_suffices(state, (job.job, other.job), kind)
            and _pair(job, slot) not in self._refused
            and state.rate_of(job, slot.shape, [other.job]) > 0
            and state.rate_of(other, slot.shape, [job.job]) > 0
        )

    def _hope(self, job: JobState, slot: Slot) -> tuple[float, int]:
        """Return what was measured of such a pair; pairs tried less come before equal ones."""
        pair = _pair(job, slot)
        return self._totals.get(pair, 1.0), -self._tried[pair]


def _pair(job: JobState, slot: Slot) -> _Pair:
    (other,) = slot.jobs.values()
    return _classes(slot.shape.device_type, job, other)


def _classes(device_type: str, first: JobState, second: JobState) -> _Pair:
    low, high = sorted(
        f"{job.job.profile or job.job.name}/{job.job.devices}" for job in (first, second)
    )
    return device_type, low, high
