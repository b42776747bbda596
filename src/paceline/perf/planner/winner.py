"""Why the winner wins, what would change the answer, and what to change when nothing fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.perf.planner.bounds import PlanBounds
from paceline.perf.planner.changes import with_changes
from paceline.perf.planner.result import Alternative, WhatIf
from paceline.perf.planner.space import AXES, SearchSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.breakdown import Breakdown
    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.perf.planner.candidates import BoundedPlans, PlanPricer
    from paceline.perf.planner.result import PricedPlan
    from paceline.perf.transformer.architecture import Architecture

_PRICED_PER_VALUE = 5  # of an axis, to find the best of its plans
_COMPARED = 300  # fastest priced plans, on each other machine
_MOST_NODES = 1 << 16
MIB, GIB = 2**20, 2**30
_CHANGES = {
    "with a network twice as fast": {"network": 2.0},
    "with a network half as fast": {"network": 0.5},
    "with links in a node half as fast": {"link": 0.5},
    "with twice the memory": {"memory": 2.0},
    "with half the memory": {"memory": 0.5},
    "with storage twice as fast": {"storage": 2.0},
}


def axis_value(plan: Plan, axis: str) -> str:
    """Return what a plan chooses on an axis of the search, in words."""
    count = plan.microbatch_count
    values: dict[str, object] = {
        "tensor": plan.mesh.tensor,
        "stages": plan.mesh.pipeline,
        "context": plan.mesh.context,
        "sequence_parallel": "yes" if plan.sequence_parallel else "no",
        "microbatch": f"{count} per replica",
        "interleave": plan.stages_per_rank,
        "schedule": plan.schedule,
        "zero": plan.zero,
        "recompute": plan.recompute,
        "precision": plan.precision,
        "compression": f"{plan.compression:g}",
        "loader_workers": plan.loader_workers,
        "ranks": plan.mesh.world_size,
        "threads": plan.threads,
        "collectives": plan.collectives,
        "bucket": f"{plan.bucket_bytes / MIB:g} MiB",
    }
    return str(values[axis])


def alternatives(
    bounded: BoundedPlans, pricer: PlanPricer, winner: PricedPlan
) -> tuple[Alternative, ...]:
    """Return for each axis the best plan with each other value, on as many nodes.

    A value's plans are priced in the order of their bounds, some of them: where the best one is not
    certain, the smallest bound that is left is returned.
    """
    same_nodes = np.flatnonzero(bounded.nodes == winner.plan.nodes)

    def best_of(axis: str, value: str, members: list[int]) -> Alternative:
        return _alternative(axis, value, same_nodes[members], bounded, pricer, winner)

    plans = [bounded.plans[index] for index in same_nodes.tolist()]
    return other_values(pricer.space.axes, plans, winner.plan, best_of)


def other_values(
    axes: Sequence[str],
    plans: Sequence[Plan],
    winner: Plan,
    best_of: Callable[[str, str, list[int]], Alternative],
) -> tuple[Alternative, ...]:
    """Return an alternative for each other value that plans have on each axis, by axis and time.

    Args:
        axes: of the search.
        plans: that were compared.
        winner: whose values are left out.
        best_of: called with an axis, a value, and the indices of the plans that have it.
    """
    found = []
    for axis in axes:
        members: dict[str, list[int]] = {}
        for index, plan in enumerate(plans):
            members.setdefault(axis_value(plan, axis), []).append(index)
        members.pop(axis_value(winner, axis), None)
        found += [best_of(axis, value, indices) for value, indices in members.items()]
    found.sort(key=lambda item: (axes.index(item.axis), item.slower is None, item.slower or 0.0))
    return tuple(found)


def _alternative(
    axis: str,
    value: str,
    indices: np.ndarray,
    bounded: BoundedPlans,
    pricer: PlanPricer,
    winner: PricedPlan,
) -> Alternative:
    fits = bounded.memory_bytes[indices] <= pricer.capacity_bytes
    fitting = indices[fits]
    best: PricedPlan | None = None
    least_s, is_exact = 0.0, True
    for count, index in enumerate(fitting[np.argsort(bounded.step_s[fitting], kind="stable")]):
        least_s = float(bounded.step_s[index])
        if best and best.step_s <= least_s:
            break
        if count == _PRICED_PER_VALUE or pricer.is_late:
            is_exact = False
            break
        priced = pricer(bounded.plans[index])
        if priced.memory_bytes <= pricer.capacity_bytes and (
            best is None or priced.step_s < best.step_s
        ):
            best = priced
    if is_exact and best is None:
        missing = float(bounded.memory_bytes[indices].min()) - pricer.capacity_bytes
        return Alternative(
            axis=axis, value=value, slower=None, missing_bytes=round(max(1, missing))
        )
    seconds = best.step_s if best and is_exact else min(least_s, best.step_s if best else least_s)
    return Alternative(
        axis=axis,
        value=value,
        slower=seconds / winner.step_s - 1,
        is_bound=not is_exact,
        why=grown_phase(*(pricer.times(each.plan).breakdown for each in (winner, best)))
        if best and is_exact
        else "",
    )


def grown_phase(winner: Breakdown, other: Breakdown) -> str:
    """Return the phase of a step that grew most from the winner's; empty if none did."""
    ours, theirs = dict(winner.items()), dict(other.items())
    grown = {name: theirs[name] - ours.get(name, 0.0) for name in theirs}
    name = max(grown, key=lambda key: grown[key])
    return name if grown[name] > 0 else ""


def what_if(pricer: PlanPricer, winner: PricedPlan) -> tuple[WhatIf, ...]:
    """Return the winner on machines that differ in one figure, among the fastest priced plans."""
    fastest = sorted(
        (plan for plan in pricer.plans if plan.plan.nodes == winner.plan.nodes),
        key=lambda plan: plan.step_s,
    )[:_COMPARED]
    found = []
    for words, factors in _CHANGES.items():
        machine = with_changes(pricer.machine, factors)
        if machine == pricer.machine or (pricer.reads_nothing and set(factors) == {"storage"}):
            continue
        capacity = pricer.capacity_bytes * factors.get("memory", 1.0)
        seconds = {
            plan.plan: pricer.step_s_on(machine, plan.plan)
            for plan in fastest
            if plan.memory_bytes <= capacity
        }
        if not seconds:
            continue
        best = min(seconds, key=lambda plan: seconds[plan])
        old_s = seconds.get(winner.plan, winner.step_s)  # where it does not fit: as it is now
        faster = old_s / seconds[best] - 1
        is_other = best != winner.plan and faster != 0
        found.append(WhatIf(change=words, faster=faster, plan=best, is_other=is_other))
    return tuple(found)


def cheapest_change(
    machine: Machine, model: Architecture, space: SearchSpace, smallest: Estimate
) -> tuple[int, str]:
    """Return (least nodes, what to change) where no plan of a space fits.

    First one fixed field is freed, on the same nodes: the change after which a step is shortest.
    Else there are more nodes: twice the most that were asked for, doubled until a plan fits.
    """
    freed = []
    for name in space.fixed:
        if name in AXES:
            fixed = {key: value for key, value in space.fixed.items() if key != name}
            found = _fastest_fitting(machine, model, replace(space, fixed=fixed))
            if found is not None:
                freed.append((found, name))
    if freed:
        (_, size, plan), name = min(freed, key=lambda item: item[0][0])
        value = axis_value(plan, name)
        return 0, f"{name} {value} in place of {space.fixed[name]}: a rank needs {_gib(size)}"
    nodes = max(space.nodes)
    while (nodes := 2 * nodes) <= _MOST_NODES:
        found = _fastest_fitting(machine, model, replace(space, nodes=(nodes,)))
        if found is not None:
            return nodes, f"{nodes} nodes: a rank needs {_gib(found[1])}"
    needed = smallest.needed_memory_bytes
    return 0, f"a device with {_gib(needed)} of memory, or a smaller batch or sequence"


def _fastest_fitting(
    machine: Machine, model: Architecture, space: SearchSpace
) -> tuple[float, int, Plan] | None:
    """Return the (least seconds, least bytes, plan) of the fastest plan that may fit, by bounds."""
    bounds = PlanBounds(machine, model, space)
    capacity = space.budget_bytes or machine.devices[0].memory_bytes.value
    best: tuple[float, int, Plan] | None = None
    for plan in space.plans(machine, model):
        size = bounds.memory_bytes(plan)
        if size > capacity:
            continue
        seconds = bounds.step_s(plan)
        if best is None or seconds < best[0]:
            best = seconds, size, plan
    return best


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
