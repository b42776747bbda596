"""Predicts training out of core: which tensors stay within a budget, and what spilling costs.

captured events, with the work between them    (training)
Machine rates -> seconds of each interval      (here)
memory plan                                    (schedules.memory, as the session makes it)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from paceline.core.errors import MemoryExceeded
from paceline.core.estimate import MemoryFit
from paceline.perf.compute import COMPUTE_PHASES, cost_model
from paceline.perf.pipeline import slowed_step_s, stage_workloads
from paceline.schedules.memory import (
    ASSUMED_BYTES_PER_S,
    SpillTier,
    least_budget_bytes,
    plan_memory,
    target_budget_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload
    from paceline.schedules.memory import StepEvents, StepProfile


def fit(
    machine: Machine, workload: Workload, plan: Plan, events: StepEvents, budget_bytes: int
) -> MemoryFit:
    """Return what goes where within a memory budget, and the predicted cost.

    Args:
        machine: on which a rank trains; its slowest storage that was read past the page cache is
            taken for the spill folder.
        workload: of the same step.
        plan: of the run.
        events: of the step, as captured.
        budget_bytes: of a rank's process.

    Raises:
        MemoryExceeded: no plan fits; the error has the smallest budget that one fits.
        UsageError: the machine has no rates.
    """
    profile = _profile(machine, workload, plan, events)
    tier, source = _tier(machine, plan)
    found = plan_memory(profile, tier, target_budget_bytes(profile, budget_bytes))
    kinds: dict[str, Counter[str]] = {"activations": Counter(), "optimizer state": Counter()}
    for tensor, action in zip(profile.tensors, found.actions, strict=True):
        kind = "activations" if tensor.kind == "activation" else "optimizer state"
        kinds[kind][action.action] += tensor.bytes
    kinds["parameters"] = Counter(keep=events.parameter_bytes)
    kinds["gradients"] = Counter(keep=events.gradient_bytes)
    return MemoryFit(
        budget_bytes=budget_bytes,
        least_bytes=least_budget_bytes(profile),
        peak_bytes=found.peak_bytes,
        in_core_peak_bytes=found.in_core_peak_bytes,
        step_s=found.step_s,
        in_core_step_s=found.in_core_step_s,
        exposed_s=found.exposed_s,
        spilled_bytes=found.spilled_bytes,
        recomputed=found.recomputed,
        kinds={kind: dict(counts) for kind, counts in kinds.items()},
        disk_bytes_per_s=tier.read_bytes_per_s,
        disk_source=source,
    )


def fit_stages(
    machine: Machine,
    workload: Workload,
    predicted: Estimate,
    events: Sequence[StepEvents],
    budget_bytes: int,
) -> Estimate:
    """Return the estimate of a model in stages, with what goes where on a rank of each stage.

    A stage's plan is that of its own passes: that a rank also waits for others, in which time it
    could transfer, is left out.

    Args:
        machine: on which ranks train; see `fit`.
        workload: of one microbatch, with edges.
        predicted: of the stages, without a budget.
        events: of a step of each stage, as captured.
        budget_bytes: of a rank's process.

    Raises:
        MemoryExceeded: no plan of a stage fits; the error has the smallest budget that one fits.
        UsageError: the machine has no rates.
    """
    plan = predicted.plan
    works = stage_workloads(workload, list(accumulate(plan.layers))[:-1])
    fits = []
    for number, (work, found) in enumerate(zip(works, events, strict=True)):
        own = found
        if plan.mesh.data > 1:  # the buckets in which gradients are reduced
            own = replace(found, process_bytes=found.process_bytes + found.gradient_bytes)
        try:
            fits.append(fit(machine, work, plan, own, budget_bytes))
        except MemoryExceeded as problem:
            raise MemoryExceeded(
                problem.what, where=f"stage {number}", why=problem.why, fix=problem.fix
            ) from None
    step_s = slowed_step_s(machine, workload, plan, [found.slowdown for found in fits])
    stages = tuple(
        replace(stage, memory_fit=found)
        for stage, found in zip(predicted.stages, fits, strict=True)
    )
    return replace(predicted, stages=stages, fitted_step_s=step_s)


def _profile(machine: Machine, workload: Workload, plan: Plan, events: StepEvents) -> StepProfile:
    """Return the captured step with the seconds of its intervals, and a process's own memory."""
    costs = cost_model(machine, workload, plan)
    seconds = [
        sum(costs.cost(operation).times(operation.count).total_s for operation in work)
        for work in events.work
    ]
    # What a phase costs beside its operators is spread over it by what these cost.
    total_s = sum(seconds) or 1.0
    extra_s = sum(costs.framework_overhead_s("torch", "phase", phase) for phase in COMPUTE_PHASES)
    seconds = [own_s * (1 + extra_s / total_s) for own_s in seconds]
    profile = events.profile
    modules = tuple(
        module._replace(compute_s=sum(seconds[begin:end]))
        for module, (begin, end) in zip(profile.modules, events.modules, strict=True)
    )
    return replace(
        profile,
        compute_s=tuple(seconds),
        floor_bytes=tuple(count + events.process_bytes for count in profile.floor_bytes),
        modules=modules,
    )


def _tier(machine: Machine, plan: Plan) -> tuple[SpillTier, str]:
    """Return the disk that tensors are spilled to, and where its rate is from."""
    measured = [tier for tier in machine.tiers if not tier.cached]
    rate, source = ASSUMED_BYTES_PER_S, "assumed"
    if measured:
        rate = measured[-1].bandwidth_bytes_per_s.value
        source = (
            f"{measured[-1].name}: {measured[-1].bandwidth_bytes_per_s.source}, writes as reads"
        )
    return SpillTier(write_bytes_per_s=rate, read_bytes_per_s=rate, cores=plan.threads), source
