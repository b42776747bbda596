"""What the steps under a plan came to: transfers, waiting, page faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.training.out_of_core.process_memory import page_faults

if TYPE_CHECKING:
    from paceline.schedules.memory import MemoryPlan
    from paceline.training.out_of_core.spill_target import Moved, SpillTarget

_PLAN_NAMES = (
    "method", "peak_bytes", "in_core_peak_bytes", "step_s", "in_core_step_s", "slowdown",
    "exposed_s", "spilled_bytes", "recomputed",
)  # fmt: skip


@dataclass(slots=True)
class Counters:
    """Sums over the steps under a plan; times in seconds, of `used_bytes` the most."""

    steps: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    diverged: int = 0
    page_faults: int = 0
    corrected: int = 0
    used_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return what a step took."""
        steps = max(self.steps, 1)
        hidden_s = max(self.transfer_s - self.exposed_s, 0.0)
        return {
            "planned_steps": self.steps,
            "corrected": self.corrected,
            "diverged_steps": self.diverged,
            "transfer_s": self.transfer_s / steps,
            "exposed_s": self.exposed_s / steps,
            "hidden_part": hidden_s / self.transfer_s if self.transfer_s else None,
            "page_faults": self.page_faults / steps,
            "peak_used_bytes": self.used_bytes or None,
        }


class StepMeter:
    """Measures each step, and adds those under a plan to the counters."""

    def __init__(self, target: SpillTarget, counters: Counters) -> None:
        self._target = target
        self._counters = counters
        self._moved_before = target.moved()
        self._faults_before = 0
        self._has_begin = False  # the first step began before anything was measured

    def end_step(self, used_bytes: int, *, is_planned: bool) -> Moved:
        """Return what moved in this step, in which at most so many bytes were in use."""
        done, faults = self._target.moved(), page_faults()
        moved = done.since(self._moved_before)
        if is_planned and self._has_begin:
            self._counters.steps += 1
            self._counters.exposed_s += moved.waited_s
            self._counters.transfer_s += moved.busy_s
            self._counters.page_faults += faults - self._faults_before
            self._counters.used_bytes = max(self._counters.used_bytes, used_bytes)
        self._moved_before, self._faults_before = done, faults
        self._has_begin = True
        return moved


def plan_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan in short."""
    return {name: getattr(plan, name) for name in _PLAN_NAMES}


def summary(plan: MemoryPlan, budget_bytes: int, target: str) -> str:
    """Return the line that says what a plan costs; `target` names where tensors go."""
    mib = 1 << 20
    if plan.method == "fits":
        return (
            f"memory: all fits the budget of {budget_bytes / mib:,.0f} MiB "
            f"(predicted peak {plan.peak_bytes / mib:,.0f} MiB); nothing is spilled"
        )
    return (
        f"memory: {plan.spilled_bytes / mib:,.0f} MiB a step go to {target} and back, predicted "
        f"peak {plan.peak_bytes / mib:,.0f} MiB of {budget_bytes / mib:,.0f} MiB "
        f"(in core {plan.in_core_peak_bytes / mib:,.0f} MiB), predicted step "
        f"{plan.slowdown:.2f} times as long"
    )
