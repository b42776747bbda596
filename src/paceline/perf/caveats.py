"""Warnings of an Estimate: what makes the prediction less certain.

A model that does not fit, operators whose rate was not measured, a machine that other processes
used while it was probed, and more ranks or nodes than were measured. None of these is an error: the
Estimate has them as data and in sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.estimate import UnpricedOperator
from paceline.perf.interval import QUIET_CORES

if TYPE_CHECKING:
    from paceline.core.machine import Device, Machine
    from paceline.core.measured_step import MeasuredStep
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload
    from paceline.perf.costs import CostModel

GIB = 2**30
NAMED = 3  # operators that a sentence names


def unpriced_operators(
    costs: CostModel, workload: Workload, step_s: float
) -> tuple[UnpricedOperator, ...]:
    """Return the operators whose rate was not measured, with their calls and share of the step.

    They belong to none of the classes of operators that the probe measures.

    Args:
        costs: of the machine's device.
        workload: the model.
        step_s: predicted seconds of a step.
    """
    counts: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for layer in workload.layers:
        for name, (calls, cost_s) in costs.layer(layer.operations).assumed.items():
            counts[name] = counts.get(name, 0) + calls
            seconds[name] = seconds.get(name, 0.0) + cost_s
    return tuple(
        UnpricedOperator(name=name, count=counts[name], share=cost_s / max(step_s, 1e-12))
        for name, cost_s in sorted(seconds.items(), key=lambda item: -item[1])
    )


def ranks_per_device(device: Device, plan: Plan) -> int:
    """Return how many ranks share one device's memory, at most."""
    count = 1 if device.kind == "cpu" else device.count  # a CPU is all cores of its node
    return -(-plan.ranks_per_node // count)


def oversubscription_factor(device: Device, plan: Plan) -> float:
    """Return how many threads share a core, on average: compute takes so many times as long.

    1 where each thread has a core of its own. Threads of one rank beyond the cores make it neither
    faster nor slower: they share the same work.
    """
    if device.kind != "cpu":
        return 1.0
    wanted = plan.ranks_per_node * min(plan.threads, device.cores)
    return max(1.0, wanted / device.cores)


def warnings(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    unpriced: tuple[UnpricedOperator, ...],
    needed_bytes: int,
    measured: MeasuredStep | None = None,
) -> tuple[str, ...]:
    """Return the sentences of an Estimate.

    Args:
        machine: on which the step was predicted.
        workload: the model.
        plan: how the model is spread over ranks and nodes.
        unpriced: operators whose rate was not measured.
        needed_bytes: memory of all ranks that share a device.
        measured: the step from which compute was predicted; None: from rates of classes.
    """
    compute = (
        (*_not_measured(workload, unpriced), *_busy(machine), *_allocator(machine, plan))
        if measured is None
        else _measured_beside(measured)
    )
    return (
        *_does_not_fit(machine.devices[0], plan, needed_bytes),
        *_extrapolated(machine, plan),
        *_engine(plan),
        *_evaluations(workload),
        *compute,
    )


def _evaluations(workload: Workload) -> list[str]:
    if workload.optimizer != "LBFGS":
        return []
    return [
        "LBFGS: predicted with its largest number of iterations and a full history; an update "
        "takes less when the loss converges, and more with a line search"
    ]


def _measured_beside(measured: MeasuredStep) -> list[str]:
    if measured.foreign_cores <= QUIET_CORES:
        return []
    return [
        f"measured while other processes used {measured.foreign_cores:.2f} cores: predicted times "
        "may be too long; plan again when nothing else runs"
    ]


def _engine(plan: Plan) -> list[str]:
    if plan.mesh.data == 1 or plan.engine not in ("fsdp2", "sharded"):
        return []
    if plan.engine == "fsdp2" and plan.mesh.pipeline > 1:
        return []
    known = "DistributedDataParallel" if plan.engine == "fsdp2" else "the engine 'allreduce'"
    return [
        f"the engine '{plan.engine}' is predicted as {known}: memory and update of a rank's part, "
        "and gathering parameters, are not predicted"
    ]


def _allocator(machine: Machine, plan: Plan) -> list[str]:
    # Figures measured with `keep` serve both: the page faults of `system` are added to them.
    if machine.allocator in ("", "keep", plan.allocator):
        return []
    return [
        f"measured under the allocator '{machine.allocator}', planned for '{plan.allocator}': "
        "predicted times may be too long"
    ]


def _does_not_fit(device: Device, plan: Plan, needed_bytes: int) -> list[str]:
    available_bytes = device.memory_bytes.value
    if needed_bytes <= available_bytes:
        return []
    ranks = ranks_per_device(device, plan)
    who = "a rank needs" if ranks == 1 else f"{ranks} ranks need"
    return [
        f"does not fit: {who} {needed_bytes / GIB:.1f} GiB, "
        f"{device.name} has {available_bytes / GIB:.1f} GiB"
    ]


def _extrapolated(machine: Machine, plan: Plan) -> list[str]:
    device, found = machine.devices[0], []
    cost = machine.collective(
        "all_reduce", plan.mesh.data, collectives=plan.collectives, hosts=plan.nodes
    )
    if plan.nodes > max(machine.nodes, cost.hosts if cost else 1):
        level = cost.level if cost else "none"
        found.append(
            f"extrapolated: {plan.nodes} nodes, {machine.name} has {machine.nodes}; communication "
            f"is priced by collectives over its {level}"
        )
    if device.kind == "cpu" and plan.ranks_per_node * plan.threads > device.cores:
        factor = oversubscription_factor(device, plan)
        slower = (
            f"{factor:.3g} times as slow"
            if factor > 1
            else f"as fast as with {device.cores} threads"
        )
        found.append(
            f"extrapolated: {plan.ranks_per_node} ranks x {plan.threads} threads on a node of "
            f"{device.cores} cores; compute is taken to be {slower}, and waiting for a core is not "
            "predicted"
        )
    if plan.mesh.data > 1 and cost is not None and cost.ranks != plan.mesh.data:
        found.append(
            f"extrapolated: collectives of {plan.mesh.data} ranks from those between {cost.ranks}"
        )
    return found


def _not_measured(workload: Workload, unpriced: tuple[UnpricedOperator, ...]) -> list[str]:
    if not unpriced:
        return []
    calls = sum(operator.count for operator in unpriced)
    total = sum(operation.count for layer in workload.layers for operation in layer.operations)
    named = ", ".join(f"{operator.name} ({operator.count})" for operator in unpriced[:NAMED])
    more = f" and {len(unpriced) - NAMED} more" if len(unpriced) > NAMED else ""
    share = sum(operator.share for operator in unpriced)
    return [
        f"rate not measured: {named}{more}; for {calls} of {total} operator calls the time of "
        f"moving their bytes is predicted, {share:.1%} of the predicted step"
    ]


def _busy(machine: Machine) -> list[str]:
    if not machine.disturbed:
        return []
    worst = max(machine.disturbed, key=lambda disturbance: disturbance.foreign_cores)
    return [
        f"{machine.name} was busy while it was probed, in {len(machine.disturbed)} parts "
        f"({worst.where}, {worst.part}: {worst.why}): predicted times may be too long; run "
        "`paceline probe` when nothing else runs"
    ]
