"""The compute of a step, layer by layer, its memory and its input: what all plans have in common.

`estimate` adds the communication of data parallelism to it, `pipeline` the waits between stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.breakdown import Breakdown
from paceline.core.errors import UsageError
from paceline.core.estimate import StageEstimate, UnpricedOperator
from paceline.core.plan import OWN_ENGINES
from paceline.perf.caveats import oversubscription_factor
from paceline.perf.costs import CostModel, OperatorCost, total_cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.machine import Device, Machine, StepPhase
    from paceline.core.measured_step import StepMeasurement
    from paceline.core.plan import Plan
    from paceline.core.workload import Layer, Workload

# Under `system` the C library gives freed memory back once about twice the largest block is free at
# the end of its heap, and the next step pays for touching it again. On six models, page faults show
# that a step gives back 0 to 3 times the largest tensor, 1.5 times on average.
# Source: mallopt(3), the dynamic M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (at most 32 MiB).
TRIM_THRESHOLD_FACTOR, REFAULTED_FACTOR = 2.0, 1.5
MAX_MMAP_THRESHOLD_BYTES = 32 << 20
# phases to which the seconds are added that a calibration run measured beyond rates, overheads and
# collectives
RESIDUALS: tuple[StepPhase, ...] = ("input", "copy", "waiting", "checkpoint", "host", "other")
COMPUTE_PHASES = ("forward", "backward", "optimizer")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """What an Estimate says of a step; its fields have the meaning of those of `Estimate`."""

    breakdown: Breakdown
    shares: dict[str, float]
    sources: dict[str, str]
    memory_bytes: dict[str, int]
    needed_bytes: int
    link_bytes: dict[str, int]
    unpriced: tuple[UnpricedOperator, ...]
    stages: tuple[StageEstimate, ...] = ()
    bubble_share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCompute:
    """What a rank computes in a step.

    Attributes:
        phases: costs by phase.
        gradients: bytes of each gradient, and seconds from the begin of the backward pass until it
            is ready, in the order of that pass.
    """

    phases: dict[str, OperatorCost]
    gradients: list[tuple[int, float]]


def step_compute(
    costs: CostModel,
    device: Device,
    workload: Workload,
    plan: Plan,
    measured: StepMeasurement | None = None,
) -> StepCompute:
    """Return the costs of a rank's compute under `plan`, on cores that its node's ranks share.

    Args:
        costs: of operator classes.
        device: that computes.
        workload: the model.
        plan: how it is spread.
        measured: the step as it was measured there; None: operators cost what their classes do.
    """
    if measured is not None:
        return _measured_compute(costs, workload, plan, measured)
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
        for phase, cost in layer_costs(costs, layer).items():
            phases[phase] += cost
        ready_s = phases["backward"].total_s
        gradients += [(size, ready_s) for size in reversed(layer.trained_bytes)]
    factor = oversubscription_factor(device, plan)
    backward_s = phases["backward"].total_s
    return StepCompute(
        phases={phase: cost.times(factor) for phase, cost in phases.items()},
        gradients=[
            (size, factor * in_last_pass(ready_s, backward_s, workload.accumulation))
            for size, ready_s in gradients
        ],
    )


def in_last_pass(ready_s: float, backward_s: float, passes: int) -> float:
    """Return when a gradient is ready that only the last of several backward passes reduces.

    Args:
        ready_s: at which part of the backward passes it is, as if they were one.
        backward_s: seconds of all passes.
        passes: how many there are.

    >>> in_last_pass(2.0, 8.0, 1), in_last_pass(2.0, 8.0, 4)
    (2.0, 6.5)
    """
    return backward_s - (backward_s - ready_s) / passes


def _measured_compute(
    costs: CostModel, workload: Workload, plan: Plan, measured: StepMeasurement
) -> StepCompute:
    """Return the costs of a step whose phases were measured.

    What bounds a phase, and when in it a gradient is ready, follows from the classes of its
    operators, scaled to the measured seconds.
    """
    phases = dict.fromkeys(COMPUTE_PHASES, OperatorCost())
    ready = []
    for layer in reversed(workload.layers):
        for phase, cost in layer_costs(costs, layer).items():
            phases[phase] += cost
        ready += [(size, phases["backward"].total_s) for size in reversed(layer.trained_bytes)]
    seconds = {phase: measured.phases[phase].total_s for phase in COMPUTE_PHASES}
    wrapped = plan.mesh.data > 1 and plan.engine not in OWN_ENGINES
    added_s = {
        phase: costs.framework_overhead_s("ddp", "wrapper", phase) if wrapped else 0.0
        for phase in COMPUTE_PHASES
    }
    backward_s = phases["backward"].total_s
    scale = seconds["backward"] / max(backward_s, 1e-12)
    return StepCompute(
        phases={
            phase: _scaled(cost, seconds[phase]) + OperatorCost(overhead_s=added_s[phase])
            for phase, cost in phases.items()
        },
        gradients=[
            (
                size,
                added_s["backward"] + scale * in_last_pass(at, backward_s, workload.accumulation),
            )
            for size, at in ready
        ],
    )


def _measured_source(measured: StepMeasurement, phase: str) -> str:
    part = measured.phases[phase]
    if not measured.operators:
        return f"measured: {measured.whole_steps} steps"
    own = [equal.calls for equal in measured.operators if equal.phase == phase]
    share = part.operators_s / max(part.total_s, 1e-12)
    return (
        f"measured: {measured.whole_steps} steps; {len(own)} distinct operators, {sum(own)} calls: "
        f"{share:.0%}"
    )


def _scaled(cost: OperatorCost, seconds: float) -> OperatorCost:
    """Return a cost of so many seconds in all, in the same proportions."""
    if cost.total_s <= 0:
        return OperatorCost(overhead_s=seconds)
    return cost.times(seconds / cost.total_s)


def _refaulted_bytes(workload: Workload) -> float:
    """Return the bytes that a step gave back to the system and touches again; 0 if it keeps all."""
    largest = min(workload.largest_bytes, MAX_MMAP_THRESHOLD_BYTES)
    beyond = workload.saved_bytes + workload.trained_bytes - TRIM_THRESHOLD_FACTOR * largest
    return max(0.0, min(REFAULTED_FACTOR * largest, beyond))


def layer_costs(costs: CostModel, layer: Layer) -> dict[str, OperatorCost]:
    """Return the costs of a layer's operators by phase."""
    return costs.layer(layer.operations).phases


def input_wait_s(
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


def shares_of(costs: Iterable[OperatorCost], breakdown: Breakdown) -> dict[str, float]:
    """Return the resources' parts of a step; the largest one is what limits it.

    Args:
        costs: of all that the rank computes in the step.
        breakdown: of the step.
    """
    total = total_cost(costs)
    seconds = {
        "operator overhead": total.overhead_s,
        "compute": total.compute_s,
        "memory bandwidth": total.memory_s,
        "communication": breakdown.transfer,
        "data loading": breakdown.input,
    }
    return {name: part_s / max(breakdown.total_s, 1e-12) for name, part_s in seconds.items()}


def compute_sources(
    machine: Machine, workload: Workload, plan: Plan, measured: StepMeasurement | None = None
) -> dict[str, str]:
    """Return where the figures of each phase but communication are from."""
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
    is_timed = workload.dataset is not None and workload.dataset.seconds_per_sample > 0
    sources = (
        dict.fromkeys(COMPUTE_PHASES, rates)
        if measured is None
        else {phase: _measured_source(measured, phase) for phase in COMPUTE_PHASES}
    )
    sources["input"] = "measured cost per sample" if is_timed else "data in memory"
    residuals = {  # of a calibration run; measured phases have their own
        overhead.phase for overhead in device.framework_overheads if overhead.what == "residual"
    }
    for phase in residuals if measured is None else residuals.difference(COMPUTE_PHASES):
        residual = "a residual measured in a run"
        sources[phase] = f"{sources[phase]}, plus {residual}" if phase in sources else residual
    return sources
