"""Finds the fastest plan and the Pareto front by branch and bound.

All plans of the space get a lower bound of their time and of their memory (`bounds`). Plans that
cannot fit are dropped. The others are priced in the order of their bounds, until each that is left
is beaten for sure: by a priced plan that is not slower than its bound, on no more devices, and does
not need more memory (by `MEMORY_STEP`, since nobody chooses between plans a percent apart). So the
winner is that of pricing all plans, as a test checks.

Source: A. Land, A. Doig, An automatic method of solving discrete programming problems, Econometrica
28 (1960).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from paceline.perf.planner.candidates import BoundedPlans, PlanPricer
from paceline.perf.planner.front import MEMORY_STEP, plan_front
from paceline.perf.planner.result import PlanSearch
from paceline.perf.planner.winner import alternatives, cheapest_change, what_if
from paceline.perf.transformer.prediction import estimate_transformer

if TYPE_CHECKING:
    from paceline.core.machine import Machine
    from paceline.perf.planner.result import PricedPlan
    from paceline.perf.planner.space import SearchSpace
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.prediction import Risks

BUDGET_S = 60.0


def search_plans(
    machine: Machine,
    model: Architecture,
    space: SearchSpace,
    risks: Risks | None = None,
    *,
    budget_s: float = BUDGET_S,
    explains: bool = True,
) -> PlanSearch:
    """Return the best plans of a space.

    Args:
        machine: with peaks, memory bandwidth and links.
        model: to train.
        space: the plans to compare.
        risks: of the winner's estimate.
        budget_s: after which no more plans are priced; what is left out is counted.
        explains: whether to price alternatives to the winner, and other machines.

    Raises:
        UsageError: the space is empty, or the machine lacks a figure.
    Cost: about 60 us per plan, 3 ms for each that is priced.
    """
    begin_s = time.monotonic()
    bounded = BoundedPlans.of(space, machine, model)
    pricer = PlanPricer(machine, model, space, begin_s + budget_s)
    fitting = np.flatnonzero(bounded.memory_bytes <= pricer.capacity_bytes)
    front, left_out = _front(bounded, fitting, pricer)
    smallest = bounded.plans[int(np.argmin(bounded.memory_bytes))]
    winner = front[0].plan if front else smallest
    best = estimate_transformer(
        machine, model, winner, space.batch, risks,
        sample=space.sample, budget_bytes=space.budget_bytes if front else None,
    )  # fmt: skip
    nodes, change = 0, ""
    if not front and explains:
        nodes, change = cheapest_change(machine, model, space, best)
    return PlanSearch(
        compared=len(bounded.plans),
        fitting=len(fitting),
        priced=len(pricer),
        left_out=left_out,
        front=front,
        best=best,
        alternatives=alternatives(bounded, pricer, front[0]) if front and explains else (),
        what_if=what_if(pricer, front[0]) if front and explains else (),
        least_nodes=nodes,
        cheapest_change=change,
        seconds=time.monotonic() - begin_s,
    )


def _front(
    bounded: BoundedPlans, fitting: np.ndarray, pricer: PlanPricer
) -> tuple[tuple[PricedPlan, ...], int]:
    """Return the plans that no other one beats, by time, and how many were left out for time."""
    order = fitting[np.argsort(bounded.step_s[fitting], kind="stable")]
    points = np.empty((0, 3))  # seconds, bytes, nodes of priced plans that fit
    found: list[PricedPlan] = []
    left_out = 0
    for index in order.tolist():
        least = bounded.step_s[index], bounded.memory_bytes[index], bounded.nodes[index]
        beaten = (points[:, 0] <= least[0]) & (points[:, 2] <= least[2])
        beaten &= points[:, 1] <= least[1] * (1 + MEMORY_STEP)
        if beaten.any():
            continue
        if pricer.is_late:
            left_out += not found or least[0] < points[:, 0].min()
            continue
        priced = pricer(bounded.plans[index])
        if priced.memory_bytes <= pricer.capacity_bytes:
            found.append(priced)
            point = priced.step_s, priced.memory_bytes, priced.plan.nodes
            points = np.vstack([points, point])
    return plan_front(found), left_out
