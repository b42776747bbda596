"""The Pareto front of priced plans: those that no other plan beats in all that matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.perf.planner.result import PricedPlan

MEMORY_STEP = 0.02  # nobody chooses between plans whose memory is a percent apart
MILLION = 1e6  # samples, for which a plan's node-hours are


def plan_front(plans: Iterable[PricedPlan]) -> tuple[PricedPlan, ...]:
    """Return the plans that no other one beats in time, memory and devices at once, by time."""
    front: list[PricedPlan] = []
    for priced in sorted(plans, key=lambda priced: (priced.step_s, priced.memory_bytes)):
        if not any(_beats(other, priced) for other in front):
            front.append(priced)
    return tuple(front)


def _beats(one: PricedPlan, other: PricedPlan) -> bool:
    """Return whether a plan is not worse than another one in anything that matters."""
    return (
        one.step_s <= other.step_s
        and one.devices <= other.devices
        and one.memory_bytes <= other.memory_bytes * (1 + MEMORY_STEP)
    )
