"""Plans of a search with their bounds, and the pricer that turns a bound into a price."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from paceline.core.errors import MemoryExceeded, UsageError
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.perf.planner.bounds import PlanBounds
from paceline.perf.planner.front import MILLION
from paceline.perf.planner.result import PricedPlan
from paceline.perf.planner.space import SearchSpace
from paceline.perf.transformer.architecture import Architecture
from paceline.perf.transformer.efficiency import efficiency_of
from paceline.perf.transformer.memory import rank_memory
from paceline.perf.transformer.offload import fit_device
from paceline.perf.transformer.step import StepSeconds, step_times
from paceline.perf.transformer.supply import supply


@dataclass(slots=True)
class PlanPricer:
    """Prices plans of one model on one machine, each once."""

    machine: Machine
    model: Architecture
    space: SearchSpace
    deadline_s: float
    _priced: dict[Plan, tuple[PricedPlan, StepSeconds]] = field(default_factory=dict)

    def __call__(self, plan: Plan) -> PricedPlan:
        """Return a plan's time and memory."""
        if plan not in self._priced:
            self._priced[plan] = self._price(plan)
        return self._priced[plan][0]

    def __len__(self) -> int:
        return len(self._priced)

    @property
    def plans(self) -> tuple[PricedPlan, ...]:
        """All that were priced."""
        return tuple(priced for priced, _ in self._priced.values())

    def times(self, plan: Plan) -> StepSeconds:
        """Return the seconds of a plan that was priced."""
        return self._priced[plan][1]

    def step_s_on(self, machine: Machine, plan: Plan) -> float:
        """Return the seconds of a priced plan on another machine, its bubble's share unchanged."""
        stretch = self.times(plan).stretch
        efficiency = efficiency_of(machine.devices[0])
        times = step_times(machine, self.model, plan, self.space.batch, efficiency, stretch)
        return self._whole(machine, plan, times)[0]

    @property
    def capacity_bytes(self) -> int:
        """Memory of a device, or as much of it as may be used."""
        budget = self.space.budget_bytes
        return int(self.machine.devices[0].memory_bytes.value) if budget is None else budget

    @property
    def reads_nothing(self) -> bool:
        """Whether samples are not read from storage."""
        return self.space.sample is None or not self.space.sample.bytes

    @property
    def is_late(self) -> bool:
        """Whether the search has had its time."""
        return time.monotonic() > self.deadline_s

    def _price(self, plan: Plan) -> tuple[PricedPlan, StepSeconds]:
        times = step_times(self.machine, self.model, plan, self.space.batch)
        step_s, memory_bytes = self._whole(self.machine, plan, times)
        priced = PricedPlan(
            plan=plan,
            step_s=step_s,
            memory_bytes=memory_bytes,
            devices=plan.nodes * self.machine.devices[0].count,
            node_hours=plan.nodes * step_s * MILLION / self.space.batch / 3600,
        )
        return priced, times

    def _whole(self, machine: Machine, plan: Plan, times: StepSeconds) -> tuple[float, int]:
        """Return (seconds of a step with its data and its transfers to the host, bytes)."""
        space = self.space
        microbatch = plan.microbatch_samples(space.batch)
        ranks = rank_memory(self.model, plan, microbatch, machine.devices[0])
        size = max(sum(kinds.values()) for kinds in ranks)
        step_s = times.breakdown.total_s
        if space.sample is not None:
            step_s += supply(machine, plan, space.batch, space.sample).wait_s(step_s)
        if space.budget_bytes is not None and size > space.budget_bytes:
            try:
                fit = fit_device(
                    machine, self.model, plan, microbatch, times,
                    step_s=step_s, budget_bytes=space.budget_bytes,
                )  # fmt: skip
            except MemoryExceeded:  # not even with all that can leave on the host
                return step_s, size
            step_s, size = fit.step_s, fit.peak_bytes
        return step_s, size


@dataclass(frozen=True, slots=True)
class BoundedPlans:
    """All plans of a space with their bounds.

    Attributes:
        plans: in any order.
        step_s: lower bounds; shape (plans,).
        memory_bytes: lower bounds; shape (plans,).
        nodes: of each; shape (plans,).
    """

    plans: list[Plan]
    step_s: np.ndarray
    memory_bytes: np.ndarray
    nodes: np.ndarray

    @classmethod
    def of(cls, space: SearchSpace, machine: Machine, model: Architecture) -> BoundedPlans:
        """Return the plans of a space.

        Raises:
            UsageError: there is none, or the machine lacks a figure.
        """
        bounds = PlanBounds(machine, model, space)
        plans = list(space.plans(machine, model))
        if not plans:
            nodes = ", ".join(map(str, space.nodes))
            raise UsageError(
                f"no plan divides a batch of {space.batch} over the devices of {nodes} nodes",
                where="paceline plan --model",
                why=", ".join(f"{name} is fixed at {value}" for name, value in space.fixed.items()),
                fix="Give a batch with more divisors, other nodes, or fewer fixed fields",
            )
        return cls(
            plans,
            np.fromiter((bounds.step_s(plan) for plan in plans), float, len(plans)),
            np.fromiter((bounds.memory_bytes(plan) for plan in plans), float, len(plans)),
            np.fromiter((plan.nodes for plan in plans), np.int64, len(plans)),
        )
