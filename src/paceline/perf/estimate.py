"""Predicts a training step: the same Breakdown as a trace has, before anything runs.

Machine + Workload + Plan -> Estimate. No torch: a login node can do it. The cost of each layer's
operators is added up (`costs`), communication is overlapped with the backward pass
(`communication`), and the loop waits for the loader when the loader is slower.
"""

from __future__ import annotations

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
from paceline.perf.communication import (
    all_reduce_s,
    beside_steps,
    broadcast_s,
    exposed_s,
    make_buckets,
    reducing_collectives,
)
from paceline.perf.compute import (
    COMPUTE_PHASES,
    RESIDUALS,
    StepCompute,
    StepPrediction,
    compute_sources,
    cost_model,
    input_wait_s,
    shares_of,
    step_compute,
)
from paceline.perf.interval import check_measured, step_interval
from paceline.perf.memory import DTYPE_BYTES, memory_bytes
from paceline.perf.pipeline import predict_pipeline

if TYPE_CHECKING:
    from paceline.core.machine import CollectiveCost, Machine
    from paceline.core.measured_step import StepMeasurement
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload
    from paceline.perf.costs import CostModel


def estimate(
    machine: Machine, workload: Workload, plan: Plan, measured: StepMeasurement | None = None
) -> Estimate:
    """Return the predicted step of `workload` on `machine` under `plan`.

    Args:
        machine: on which ranks train.
        workload: of a rank's step; of a plan with a pipeline, of one microbatch, with edges.
        plan: how the workload is spread over ranks.
        measured: the step as it was measured on a node of the machine, with the plan's ranks and
            threads; None: operators cost what the machine's rates of their classes say.

    Raises:
        UsageError: the plan asks for tensor parallelism, the machine has no device or rates, no
            cost of the ranks' collectives, or no link between stages, or the workload cannot be
            cut into stages; or the measured step is not the plan's.
    """
    if plan.mesh.tensor > 1 or plan.mesh.context > 1:
        raise UsageError(
            "only data parallelism and pipelines of a captured model can be predicted",
            where=f"mesh {plan.mesh.pipeline} x {plan.mesh.tensor} (pipeline x tensor)",
            fix="Plan with tensor = 1 and context = 1, or a transformer with paceline plan --model",
        )
    if plan.precision not in DTYPE_BYTES:
        raise UsageError(
            f"operators of precision {plan.precision} have no measured rates",
            where="Plan",
            fix=f"Plan with {' or '.join(DTYPE_BYTES)}",
        )
    if measured is not None:
        check_measured(measured, plan)
    beside = machine if measured is None else beside_steps(machine, measured)
    costs = cost_model(machine, workload, plan)
    step = _predict(costs, beside, workload, plan, measured)
    step_s = step.breakdown.total_s
    interval = step_interval(beside, workload, plan, costs, step.breakdown, measured)
    available_bytes = machine.devices[0].memory_bytes.value
    return Estimate(
        workload=workload.name,
        workload_digest=workload.digest(),
        machine=machine.name,
        machine_digest=machine.digest(),
        plan=plan,
        breakdown=step.breakdown,
        step_time_s=step_s,
        low_s=interval.low_s,
        high_s=interval.high_s,
        memory_bytes=step.memory_bytes,
        link_bytes=step.link_bytes,
        trained_parameter_bytes=workload.trained_bytes,
        # the bottleneck: the largest share
        limit=max(step.shares, key=lambda name: step.shares[name]),
        shares=step.shares,
        sources=step.sources,
        fits=step.needed_bytes <= available_bytes,
        needed_memory_bytes=step.needed_bytes,
        available_memory_bytes=int(available_bytes),
        stages=step.stages,
        bubble_share=step.bubble_share,
        unpriced=step.unpriced,
        warnings=warnings(machine, workload, plan, step.unpriced, step.needed_bytes, measured),
    )


def _predict(
    costs: CostModel,
    machine: Machine,
    workload: Workload,
    plan: Plan,
    measured: StepMeasurement | None,
) -> StepPrediction:
    if plan.mesh.pipeline > 1:
        return predict_pipeline(machine, workload, plan)
    breakdown, compute = _breakdown(costs, machine, workload, plan, measured)
    unpriced = unpriced_operators(costs, workload, breakdown.total_s) if measured is None else ()
    memory = memory_bytes(workload, plan, measured)
    return StepPrediction(
        breakdown=breakdown,
        shares=shares_of(compute.phases.values(), breakdown),
        sources=_sources(machine, workload, plan, measured),
        memory_bytes=memory,
        needed_bytes=sum(memory.values()) * ranks_per_device(machine.devices[0], plan),
        link_bytes=_link_bytes(workload, plan),
        unpriced=unpriced,
    )


def step_breakdown(machine: Machine, workload: Workload, plan: Plan) -> Breakdown:
    """Return only the seconds by phase of `estimate`; errors as there."""
    if plan.mesh.pipeline > 1:
        return predict_pipeline(machine, workload, plan).breakdown
    return _breakdown(cost_model(machine, workload, plan), machine, workload, plan, None)[0]


def _breakdown(
    costs: CostModel,
    machine: Machine,
    workload: Workload,
    plan: Plan,
    measured: StepMeasurement | None,
) -> tuple[Breakdown, StepCompute]:
    """Return the seconds of the step by phase, and the costs of its compute."""
    compute = step_compute(costs, machine.devices[0], workload, plan, measured)
    transfer_s, buffer_broadcast_s = _communication_s(costs, machine, workload, plan, compute)
    phases_s = {phase: compute.phases[phase].total_s for phase in COMPUTE_PHASES}
    residual_s = {
        phase: costs.framework_overhead_s("loop", "residual", phase) for phase in RESIDUALS
    }
    if plan.mesh.data == 1:
        residual_s["waiting"] = 0.0  # there is nobody to wait for
    elif measured is not None:
        once_s = _collective(machine, "all_reduce", plan).seconds_at(0)  # is in transfer, too
        residual_s["waiting"] = measured.waiting_s + max(0.0, measured.meeting_s - once_s)
    busy_s = sum(phases_s.values()) + transfer_s + buffer_broadcast_s
    # A measured step ran beside as many others as planned: what they share is in its times.
    factor = oversubscription_factor(machine.devices[0], plan)
    input_s = input_wait_s(workload, plan, busy_s, factor, residual_s["input"])
    rest_s = {**residual_s, "input": input_s}
    return Breakdown(**phases_s, transfer=transfer_s + buffer_broadcast_s, **rest_s), compute


def _communication_s(
    costs: CostModel, machine: Machine, workload: Workload, plan: Plan, compute: StepCompute
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
        cpu_moves=plan.ranks_per_node > 1 and machine.devices[0].kind == "cpu",
        per_core=oversubscription_factor(machine.devices[0], plan),
    )
    if is_own or not workload.buffer_bytes:
        return transfer_s, 0.0
    # Running means and their integer counters go in one broadcast per dtype.
    cost = _collective(machine, "broadcast", plan)
    empty_s = costs.framework_overhead_s("ddp", "buffer_broadcast", "forward") or None
    counters_s = broadcast_s(cost, 0, ranks, empty_s)
    return transfer_s, counters_s + broadcast_s(cost, workload.buffer_bytes, ranks, empty_s)


def _collective(machine: Machine, operation: str, plan: Plan) -> CollectiveCost:
    collectives = reducing_collectives(plan)
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


def _link_bytes(workload: Workload, plan: Plan) -> dict[str, int]:
    ranks = plan.mesh.data
    if ranks == 1:
        return {}
    level = "node" if plan.nodes == 1 else "network"
    return {level: workload.trained_bytes * 2 * (ranks - 1) // ranks + workload.buffer_bytes}


def _sources(
    machine: Machine, workload: Workload, plan: Plan, measured: StepMeasurement | None
) -> dict[str, str]:
    sources = compute_sources(machine, workload, plan, measured)
    if plan.mesh.data > 1:
        cost = _collective(machine, "all_reduce", plan)
        source = cost.points[0].seconds.source
        sources["transfer"] = f"{cost.backend}: {source}, {cost.ranks} ranks"
        if measured is not None and measured.reduced_bytes and cost.backend == "gloo":
            sources["transfer"] += ", as slow as beside the steps"
        meets = measured is not None and measured.meeting_s > 0
        if oversubscription_factor(machine.devices[0], plan) > 1 and not meets:
            # 4 ranks on 2 cores: 8 times as long as the links promise
            sources["transfer"] += "; too low, as waiting for a core is not in it"
    return sources
