"""Predicts a training step: the same Breakdown as a trace has, before anything runs.

Machine + Workload + Plan -> Estimate. No torch: a login node can do it. The cost of each layer's
operators is added up (`costs`), communication is overlapped with the backward pass
(`communication`), and the loop waits for the loader when the loader is slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.breakdown import Breakdown
from paceline.core.errors import UsageError
from paceline.core.estimate import Estimate
from paceline.core.plan import OWN_ENGINES
from paceline.perf.caveats import (
    oversubscription_factor,
    ranks_per_device,
    unpriced_operators,
    warnings,
)
from paceline.perf.communication import all_reduce_s, broadcast_s, exposed_s, make_buckets
from paceline.perf.costs import CostModel, OperatorCost, total_cost

if TYPE_CHECKING:
    from paceline.core.machine import CollectiveCost, Device, Machine, StepPhase
    from paceline.core.plan import CollectivesChoice, Plan
    from paceline.core.workload import Layer, Workload

INTERVAL_HALF_WIDTH = 0.25  # relative to the step time; measured by bench/predict_small.py
# Under `system` the C library gives freed memory back once about twice the largest block is free at
# the end of its heap, and the next step pays for touching it again. On six models, page faults show
# that a step gives back 0 to 3 times the largest tensor, 1.5 times on average.
# Source: mallopt(3), the dynamic M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (at most 32 MiB).
TRIM_THRESHOLD_FACTOR, REFAULTED_FACTOR = 2.0, 1.5
MAX_MMAP_THRESHOLD_BYTES = 32 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# phases to which the seconds are added that a calibration run measured beyond rates, overheads and
# collectives
RESIDUALS: tuple[StepPhase, ...] = ("input", "copy", "waiting", "checkpoint", "host", "other")
COMPUTE_PHASES = ("forward", "backward", "optimizer")


def estimate(machine: Machine, workload: Workload, plan: Plan) -> Estimate:
    """Return the predicted step of `workload` on `machine` under `plan`.

    Raises:
        UsageError: the plan asks for pipeline or tensor parallelism, the machine has no device or
            rates, or no cost of the ranks' collectives.
    """
    if plan.mesh.pipeline > 1 or plan.mesh.tensor > 1:
        raise UsageError(
            "only data parallelism can be predicted",
            where=f"mesh {plan.mesh.pipeline} x {plan.mesh.tensor} (pipeline x tensor)",
            fix="Plan with pipeline = tensor = 1",
        )
    costs = cost_model(machine, workload, plan)
    breakdown, compute = _breakdown(costs, machine, workload, plan)
    shares = _shares(compute, breakdown)
    step_s = breakdown.total_s
    memory = memory_bytes(workload, plan)
    device = machine.devices[0]
    needed_bytes = sum(memory.values()) * ranks_per_device(device, plan)
    unpriced = unpriced_operators(costs, workload, step_s)
    return Estimate(
        workload=workload.name,
        workload_digest=workload.digest(),
        machine=machine.name,
        machine_digest=machine.digest(),
        plan=plan,
        breakdown=breakdown,
        step_time_s=step_s,
        low_s=step_s * (1 - INTERVAL_HALF_WIDTH),
        high_s=step_s * (1 + INTERVAL_HALF_WIDTH),
        memory_bytes=memory,
        link_bytes=_link_bytes(workload, plan),
        trained_parameter_bytes=workload.trained_bytes,
        # the bottleneck: the largest share
        limit=max(shares, key=lambda name: shares[name]),
        shares=shares,
        sources=_sources(machine, workload, plan),
        fits=needed_bytes <= device.memory_bytes.value,
        needed_memory_bytes=needed_bytes,
        available_memory_bytes=int(device.memory_bytes.value),
        unpriced=unpriced,
        warnings=warnings(machine, workload, plan, unpriced, needed_bytes),
    )


def step_breakdown(machine: Machine, workload: Workload, plan: Plan) -> Breakdown:
    """Return only the seconds by phase of `estimate`; errors as there."""
    return _breakdown(cost_model(machine, workload, plan), machine, workload, plan)[0]


def cost_model(machine: Machine, workload: Workload, plan: Plan) -> CostModel:
    """Return the costs of operators of `workload` under `plan` on the machine's first device.

    Raises:
        UsageError: the machine has no device or no rates.
    """
    if not machine.devices:
        raise UsageError(
            "the machine has no device to compute on",
            where=machine.name,
            why="; ".join(machine.missing),
            fix="Run `paceline probe` on a node with torch",
        )
    if not machine.devices[0].rates:
        raise UsageError(
            "the machine has no compute rates",
            where=machine.name,
            why="; ".join(machine.missing),
            fix="Run `paceline probe` where torch is installed and little else runs",
        )
    parameters = workload.parameter_bytes + 2 * workload.trained_bytes  # gradients, read and made
    return CostModel(
        machine.devices[0],
        threads=plan.threads,
        processes=plan.ranks_per_node,
        step_bytes=workload.saved_bytes + parameters + workload.optimizer_bytes,
        precision=plan.precision,
        collectives=plan.collectives,
    )


def _breakdown(
    costs: CostModel, machine: Machine, workload: Workload, plan: Plan
) -> tuple[Breakdown, _Compute]:
    """Return the seconds of the step by phase, and the costs of its compute."""
    compute = _compute(costs, machine.devices[0], workload, plan)
    transfer_s, buffer_broadcast_s = _communication_s(costs, machine, workload, plan, compute)
    phases_s = {phase: compute.phases[phase].total_s for phase in COMPUTE_PHASES}
    residual_s = {
        phase: costs.framework_overhead_s("loop", "residual", phase) for phase in RESIDUALS
    }
    if plan.mesh.data == 1:
        residual_s["waiting"] = 0.0  # there is nobody to wait for
    busy_s = sum(phases_s.values()) + transfer_s + buffer_broadcast_s
    factor = oversubscription_factor(machine.devices[0], plan)
    input_s = _input_s(workload, plan, busy_s, factor, residual_s["input"])
    rest_s = {**residual_s, "input": input_s}
    return Breakdown(**phases_s, transfer=transfer_s + buffer_broadcast_s, **rest_s), compute


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compute:
    """Costs by phase, and when each gradient is ready (bytes, seconds), in backward order."""

    phases: dict[str, OperatorCost]
    gradients: list[tuple[int, float]]


def _compute(costs: CostModel, device: Device, workload: Workload, plan: Plan) -> _Compute:
    phases = {
        phase: OperatorCost(overhead_s=costs.framework_overhead_s("torch", "phase", phase))
        for phase in COMPUTE_PHASES
    }
    if plan.mesh.data > 1 and plan.engine not in OWN_ENGINES:
        for phase in ("forward", "backward"):
            phases[phase] += OperatorCost(
                overhead_s=costs.framework_overhead_s("ddp", "wrapper", phase)
            )
    gives_back = plan.allocator == "system"
    if gives_back and device.kind == "cpu" and device.first_touch_bytes_per_s:
        touch_s = _refaulted_bytes(workload) / device.first_touch_bytes_per_s.value
        for phase in ("forward", "backward"):
            phases[phase] += OperatorCost(memory_s=touch_s / 2)
    gradients = []
    for layer in reversed(workload.layers):
        for phase, cost in _layer_costs(costs, layer).items():
            phases[phase] += cost
        ready_s = phases["backward"].total_s
        gradients += [(size, ready_s) for size in reversed(layer.trained_bytes)]
    factor = oversubscription_factor(device, plan)
    return _Compute(
        phases={phase: cost.times(factor) for phase, cost in phases.items()},
        gradients=[(size, ready_s * factor) for size, ready_s in gradients],
    )


def _refaulted_bytes(workload: Workload) -> float:
    """Return the bytes that a step gave back to the system and touches again; 0 if it keeps all."""
    largest = min(workload.largest_bytes, MAX_MMAP_THRESHOLD_BYTES)
    beyond = workload.saved_bytes + workload.trained_bytes - TRIM_THRESHOLD_FACTOR * largest
    return max(0.0, min(REFAULTED_FACTOR * largest, beyond))


def _layer_costs(costs: CostModel, layer: Layer) -> dict[str, OperatorCost]:
    by_phase: dict[str, OperatorCost] = {}
    for operation in layer.operations:
        cost = costs.cost(operation).times(operation.count)
        by_phase[operation.phase] = by_phase.get(operation.phase, OperatorCost()) + cost
    return by_phase


def _communication_s(
    costs: CostModel, machine: Machine, workload: Workload, plan: Plan, compute: _Compute
) -> tuple[float, float]:
    """Return the seconds that communication adds to a step.

    Paceline's engine reduces all gradients at the end of the backward pass where the ranks share a
    node, and as DDP does between nodes; it has no buffers to broadcast.

    Returns:
        (seconds of gradient all-reduce that the backward pass does not hide, seconds of DDP's
        buffer broadcast before the forward pass).
    """
    ranks = plan.mesh.data
    if ranks == 1:
        return 0.0, 0.0
    is_own = plan.engine in OWN_ENGINES
    if is_own and plan.nodes == 1:
        size = sum(size for size, _ in compute.gradients)
        return sum(all_reduce_s(_collective(machine, "all_reduce", plan), size, ranks)), 0.0
    buckets = make_buckets(
        compute.gradients,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
    )
    transfer_s = exposed_s(
        buckets,
        compute.phases["backward"].total_s,
        _collective(machine, "all_reduce", plan),
        ranks,
        added_s_per_byte=0.0
        if is_own
        else costs.framework_overhead_s("ddp", "reduction", "backward"),
        cpu_moves=plan.ranks_per_node > 1,
    )
    if is_own or not workload.buffer_bytes:
        return transfer_s, 0.0
    # Running means and their integer counters go in one broadcast per dtype.
    cost = _collective(machine, "broadcast", plan)
    empty_s = costs.framework_overhead_s("ddp", "buffer_broadcast", "forward") or None
    counters_s = broadcast_s(cost, 0, ranks, empty_s)
    return transfer_s, counters_s + broadcast_s(cost, workload.buffer_bytes, ranks, empty_s)


def _collectives(plan: Plan) -> CollectivesChoice:
    """Return by what gradients are reduced: on one node Paceline's engine has shared memory."""
    in_memory = plan.engine in OWN_ENGINES and plan.nodes == 1
    return "paceline" if in_memory else plan.collectives


def _collective(machine: Machine, operation: str, plan: Plan) -> CollectiveCost:
    collectives = _collectives(plan)
    cost = machine.collective(operation, plan.mesh.data, collectives=collectives, hosts=plan.nodes)
    if cost is None:
        library = "" if collectives == "torch" else f" by {collectives}"
        raise UsageError(
            f"the machine has no cost of {operation}{library}",
            where=machine.name,
            why="; ".join(machine.missing),
            fix="Run `paceline probe` on a node with two cores and torch",
        )
    return cost


def _input_s(
    workload: Workload, plan: Plan, busy_s: float, factor: float, residual_s: float
) -> float:
    """Return seconds that the loop waits for a batch.

    Without workers the loop prepares the batch itself. With w workers a batch is ready every 1/w of
    its cost, and the loop waits only for what exceeds the rest of the step.
    """
    dataset = workload.dataset
    loading_s = workload.batch * dataset.seconds_per_sample * factor if dataset else 0.0
    batch_s = max(0.0, loading_s + residual_s)
    if plan.loader_workers == 0:
        return batch_s
    return max(0.0, batch_s / plan.loader_workers - busy_s)


def memory_bytes(workload: Workload, plan: Plan) -> dict[str, int]:
    """Return the bytes that a rank needs at its peak, by kind.

    ``buckets`` are DistributedDataParallel's copies of the gradients.
    """
    scale = DTYPE_BYTES[plan.precision] / DTYPE_BYTES["float32"]
    return {
        "parameters": workload.parameter_bytes,
        "gradients": workload.trained_bytes,
        "optimizer": workload.optimizer_bytes,
        "activations": int(workload.saved_bytes * scale),
        "buffers": workload.buffer_bytes,
        "input": workload.input_bytes,
        "buckets": workload.trained_bytes if plan.mesh.data > 1 else 0,
    }


def _link_bytes(workload: Workload, plan: Plan) -> dict[str, int]:
    ranks = plan.mesh.data
    if ranks == 1:
        return {}
    level = "node" if plan.nodes == 1 else "network"
    return {level: workload.trained_bytes * 2 * (ranks - 1) // ranks + workload.buffer_bytes}


def _shares(compute: _Compute, breakdown: Breakdown) -> dict[str, float]:
    total = total_cost(compute.phases.values())
    seconds = {
        "operator overhead": total.overhead_s,
        "compute": total.compute_s,
        "memory bandwidth": total.memory_s,
        "communication": breakdown.transfer,
        "data loading": breakdown.input,
    }
    return {name: part_s / max(breakdown.total_s, 1e-12) for name, part_s in seconds.items()}


def _sources(machine: Machine, workload: Workload, plan: Plan) -> dict[str, str]:
    device = machine.devices[0]
    asked = (plan.threads, plan.ranks_per_node)
    exact = any((rate.threads, rate.processes) == asked for rate in device.rates)
    kinds = "/".join(sorted({rate.source for rate in device.rates}))
    rates = f"rates: {kinds}" + ("" if exact else ", scaled from other threads or processes")
    factor = oversubscription_factor(device, plan)
    if factor > 1:
        rates += (
            f"; {plan.ranks_per_node} ranks share {device.cores} cores, "
            f"oversubscription factor {factor:g}"
        )
    measured = workload.dataset is not None and workload.dataset.seconds_per_sample > 0
    sources = dict.fromkeys(COMPUTE_PHASES, rates)
    sources["input"] = "measured cost per sample" if measured else "data in memory"
    residuals = {
        overhead.phase for overhead in device.framework_overheads if overhead.what == "residual"
    }
    for phase in residuals:
        residual = "a residual measured in a run"
        sources[phase] = f"{sources[phase]}, plus {residual}" if phase in sources else residual
    if plan.mesh.data > 1:
        cost = _collective(machine, "all_reduce", plan)
        source = cost.points[0].seconds.source
        sources["transfer"] = f"{cost.backend}: {source}, {cost.ranks} ranks"
        if factor > 1:  # 4 ranks on 2 cores: 8 times as long as the links promise
            sources["transfer"] += "; too low, as waiting for a core is not in it"
    return sources
