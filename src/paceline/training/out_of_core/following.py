"""A plan that is carried out: what starts and what must be done at each event of a step.

The budget is held by the order of events, not by time: where the disk is slower than planned, the
step waits for it, and `Following` counts the steps that did.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.schedules.memory import MemoryPlan, SpillTier, StepProfile
    from paceline.training.out_of_core.managed import Managed
    from paceline.training.out_of_core.recording import Event
    from paceline.training.out_of_core.spill_target import Moved

SLOW_PART = 0.5  # of the planned rate: a disk below it is slower than planned
LATE_PART = 0.1  # of a step that it must wait more than planned for a slow disk to matter


class Following:
    """A plan, and the tensors of the step that follows it.

    Args:
        plan: to carry out.
        profile: that it was made of.
        places: index in the profile of each tensor, by kind and number.
        order: of the events of a step.
        tier: that was planned with.

    Attributes:
        profile: that the plan was made of.
        late_steps: in a row that waited because the disk is slower than planned.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        profile: StepProfile,
        places: dict[tuple[str, int], int],
        order: Sequence[Event],
        tier: SpillTier,
    ) -> None:
        self.plan = plan
        self.profile = profile
        self.tier = tier
        self.late_steps = 0
        self._order = order
        self._places = places
        self._due: dict[int, list[int]] = {}
        self._starts: dict[int, list[int]] = {}
        self._current: dict[int, weakref.ref[Managed]] = {}  # by index in the profile
        for place, action in enumerate(plan.actions):
            if action.action == "spill":
                self._due.setdefault(action.written_by % profile.events, []).append(place)
                self._starts.setdefault(action.read_at, []).append(place)

    def expected(self, at: int) -> Event | None:
        """Return the event of this number; None after the step's end."""
        return self._order[at] if at < len(self._order) else None

    def take(self, kind: str, managed: Managed) -> None:
        """Begin what the plan has for a tensor that is there."""
        place = self._places.get((kind, managed.index))
        if place is None:
            return
        self._current[place] = weakref.ref(managed)
        if self.plan.actions[place].action == "spill":
            managed.spill()

    def load_kept(self, states: dict[int, Managed]) -> None:
        """Bring the state back that stays from now on, and remember where all of it is."""
        for (kind, index), place in self._places.items():
            if kind == "optimizer" and index in states:
                self._current[place] = weakref.ref(states[index])
                if self.plan.actions[place].action == "keep":
                    states[index].load()

    def settle(self, at: int) -> None:
        """Await the writes and start the reads that the plan has at an event."""
        for managed in self._found(self._due.get(at, ())):
            managed.wait_written()
        for managed in self._found(self._starts.get(at, ())):
            managed.start_reading()

    def held(self) -> list[Managed]:
        """Return the tensors of the step, and all state."""
        return self._found(self._current)

    def end_step(self) -> None:
        """Forget the step's own tensors."""
        state = {place for (kind, _), place in self._places.items() if kind == "optimizer"}
        self._current = {place: ref for place, ref in self._current.items() if place in state}

    def judge(self, moved: Moved) -> None:
        """Count a step whose transfers took longer than planned, and that waited for them."""
        write, read = moved.write_bytes_per_s, moved.read_bytes_per_s
        if write is None or read is None:
            self.late_steps = 0
            return
        rate = min(write / self.tier.write_bytes_per_s, read / self.tier.read_bytes_per_s)
        is_late = moved.waited_s - self.plan.exposed_s > LATE_PART * self.plan.step_s
        self.late_steps = self.late_steps + 1 if rate < SLOW_PART and is_late else 0

    def _found(self, places: Sequence[int] | dict[int, weakref.ref[Managed]]) -> list[Managed]:
        refs = (self._current.get(place) for place in places)
        return [managed for ref in refs if ref is not None and (managed := ref()) is not None]
