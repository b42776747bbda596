"""Makes the plan of recorded steps: what stays, what is spilled, which modules are recomputed.

Where modules are recomputed, steps have other events than those that were recorded: two plans are
made, the first of which chooses the modules, and the second one what is spilled of the new steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import MemoryExceeded
from paceline.schedules.memory import (
    ASSUMED_BYTES_PER_S,
    SpillTier,
    plan_memory,
    target_budget_bytes,
)
from paceline.training.out_of_core.following import Following
from paceline.training.out_of_core.spill_target import Moved
from paceline.training.out_of_core.step_profile import profile_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.schedules.memory import MemoryPlan, StepProfile
    from paceline.training.out_of_core.recording import OrderRecorder
    from paceline.training.out_of_core.spill_target import SpillTarget


class Planner:
    """Makes plans for one session.

    Args:
        target: whose rates, as shown since steps are recorded, are planned with.
        say: is called with each line for the user.

    Attributes:
        recompute: has these modules recomputed, and no others; None where none may be.
    """

    def __init__(self, target: SpillTarget, say: Callable[[str], None]) -> None:
        self.recompute: Callable[[tuple[str, ...]], None] | None = None
        self._target = target
        self._say = say
        self._moved_before = Moved()  # before the recorded steps
        self._first_plan: MemoryPlan | None = None  # which chose the modules that are recomputed
        self._recomputed_s = 0.0

    def begin(self) -> None:
        """Begin anew: the steps that follow are recorded, and modules are chosen again."""
        self._moved_before = self._target.moved()
        if self.recompute is not None and self._first_plan is not None:
            self.recompute(())
            self._first_plan = None

    def plan(
        self,
        recorder: OrderRecorder,
        state_bytes: dict[int, int],
        budget_bytes: int,
        fault_s: float,
    ) -> Following | None:
        """Plan the steps that follow after recorded ones; None where others must be recorded.

        Args:
            recorder: of two steps of the same order.
            state_bytes: of the optimizer's state, by its index.
            budget_bytes: of the process.
            fault_s: seconds of a page fault, which no planned step has.

        Raises:
            MemoryExceeded: no plan holds the budget.
        """
        profile, places = profile_of(recorder.step, state_bytes, recorder.after_step, fault_s)
        if self.recompute is None or self._first_plan is not None:
            profile = replace(profile, modules=())
        target = target_budget_bytes(profile, budget_bytes)
        tier = self.tier()
        try:
            plan = plan_memory(profile, tier, target)
        except MemoryExceeded:
            if self._first_plan is None or self.recompute is None:
                raise
            self._end_recomputing(self.recompute)
            return None
        if plan.recomputed:
            assert self.recompute is not None
            self._begin_recomputing(plan, profile, self.recompute)
            return None
        return Following(self._compared(plan), profile, places, recorder.step.events, tier)

    def tier(self) -> SpillTier:
        """Return what the target has shown since steps are recorded."""
        done = self._target.moved().since(self._moved_before)
        moved = done.written_bytes + done.read_bytes
        return SpillTier(
            name=self._target.place,
            write_bytes_per_s=done.write_bytes_per_s or ASSUMED_BYTES_PER_S,
            read_bytes_per_s=done.read_bytes_per_s or ASSUMED_BYTES_PER_S,
            cpu_s_per_byte=2 * done.cpu_s / moved if moved else 0.0,
            cores=torch.get_num_threads(),
        )

    def _begin_recomputing(
        self,
        plan: MemoryPlan,
        profile: StepProfile,
        recompute: Callable[[tuple[str, ...]], None],
    ) -> None:
        recompute(plan.recomputed)
        self._first_plan = plan
        self._recomputed_s = sum(
            module.compute_s for module in profile.modules if module.name in plan.recomputed
        )
        self._say(
            f"memory: {len(plan.recomputed)} modules are computed again in place of keeping what "
            f"they save ({', '.join(plan.recomputed)}); their steps are recorded"
        )

    def _end_recomputing(self, recompute: Callable[[tuple[str, ...]], None]) -> None:
        """Go without: what a module computes again does not fit after all."""
        recompute(())
        self.recompute = self._first_plan = None
        self._say("memory: a recomputed module needs too much at once; steps are recorded without")

    def _compared(self, plan: MemoryPlan) -> MemoryPlan:
        """Return a plan whose comparison is with a step that neither spills nor recomputes."""
        first = self._first_plan
        if first is None:
            return plan
        return replace(
            plan,
            recomputed=first.recomputed,
            in_core_peak_bytes=first.in_core_peak_bytes,
            in_core_step_s=max(plan.in_core_step_s - self._recomputed_s, 1e-9),
        )
