"""What a search of plans found: the front, the winner, and what each of its choices is worth."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.estimate import Estimate
from paceline.core.plan import Plan
from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedPlan(Record):
    """A plan with its prediction.

    Attributes:
        plan: how the model is spread.
        step_s: seconds of a step.
        memory_bytes: of the fullest rank; where ranks share a device, of all of them.
        devices: that it needs, all of its nodes.
        node_hours: of a million samples.
    """

    plan: Plan
    step_s: float
    memory_bytes: int
    devices: int
    node_hours: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative(Record):
    """The best plan with another value of one axis, on as many nodes as the winner.

    Attributes:
        axis: of the search.
        value: in this plan.
        slower: its time over the winner's, less 1; None: none was priced that fits.
        missing_bytes: by which the smallest plan of this value does not fit; 0 where one fits.
        is_bound: whether `slower` is a lower bound: the search did not price this value's plans.
        why: the phase that grew most.
    """

    axis: str
    value: str
    slower: float | None
    missing_bytes: int = 0
    is_bound: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf(Record):
    """The winner on another machine, among the plans that were priced.

    Attributes:
        change: of the machine, in words.
        faster: the old winner's step over the new winner's on the changed machine, less 1.
        plan: the new winner.
        is_other: whether it is another plan.
    """

    change: str
    faster: float
    plan: Plan
    is_other: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSearch(Record):
    """Outcome of a search.

    Attributes:
        compared: plans in the space.
        fitting: of them fit by their lower bound of memory.
        priced: of them were priced in full; bounds excluded the others.
        left_out: plans that might be better than the winner, which there was no time to price.
        seconds: that the search took.
        front: plans that no other one beats in time, memory and devices at once, by time; empty:
            none fits.
        best: the estimate of the first one of the front; of the smallest plan where none fits.
        alternatives: what other values of each axis would cost.
        what_if: what another machine would change.
        least_nodes: where none fits: the least nodes on which one fits; 0: none was found.
        cheapest_change: where none fits: what to change, in words.
    """

    compared: int
    fitting: int
    priced: int
    left_out: int
    seconds: float
    front: tuple[PricedPlan, ...]
    best: Estimate
    alternatives: tuple[Alternative, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    least_nodes: int = 0
    cheapest_change: str = ""

    @property
    def fits(self) -> bool:
        """Whether a plan fits."""
        return bool(self.front)
