"""Decides whether a step can be measured here, and predicts it either way.

A measured step beats rates of operator classes wherever the planned node is at hand. Elsewhere, or
where the step does not run, rates are what there is: then the Estimate says why.
"""

from __future__ import annotations

import dataclasses
import platform
from typing import TYPE_CHECKING

from paceline.core import node
from paceline.core.affinity import allowed_cores
from paceline.core.errors import (
    DeadlineExceeded,
    Missing,
    PacelineError,
    ScriptFailed,
    StorageError,
    UsageError,
)
from paceline.perf import estimate
from paceline.training.measured.process import measure_step

if TYPE_CHECKING:
    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.core.measured_step import ComputeChoice
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload

MOST_PROCESSES_PER_CORE = 4
MEMORY_PART = 0.8  # of the node's, that the measured processes may need
# What keeps a step from being measured, without a mistake of Paceline's:
NO_STEP = (UsageError, ScriptFailed, DeadlineExceeded, Missing, StorageError)


def estimate_here(
    machine: Machine, workload: Workload, plan: Plan, target: str, compute: ComputeChoice
) -> Estimate:
    """Return the prediction of data-parallel ranks, from a measured step if there can be one.

    Args:
        machine: that was probed or described.
        workload: of the function's step.
        plan: of data-parallel ranks.
        target: ``FILE.py:FUNCTION``.
        compute: as for `predict`.

    Raises:
        UsageError: the plan cannot be predicted; or, with ``measured``, the step not measured here.
        PacelineError: with ``measured``, the measurement failed: see `measure_step`.
    """
    by_rates = estimate(machine, workload, plan)
    if compute == "rates":
        return by_rates
    why_not = reason_not_to_measure(machine, plan, by_rates.needed_memory_bytes)
    if workload.optimizer == "LBFGS":
        why_not = "LBFGS runs the model as often as the values of the loss ask for"
    if why_not and compute == "measured":
        raise refuse_to_measure(machine, why_not)
    if why_not:
        return by_rates
    try:
        measured = measure_step(
            target,
            machine_digest=machine.digest(),
            ranks=plan.ranks_per_node,
            threads=plan.threads,
            allocator=plan.allocator,
        )
    except NO_STEP as problem:
        if compute == "measured":
            raise
        return with_warning(by_rates, problem)
    return estimate(machine, workload, plan, measured)


def reason_not_to_measure(machine: Machine, plan: Plan, needed_bytes: int) -> str:
    """Return why a step of a plan is not measured on this host; empty if it can be.

    Args:
        machine: on which it is planned.
        plan: how it is spread.
        needed_bytes: memory of all ranks of a node, as predicted.
    """
    device = machine.devices[0]
    cores = len(allowed_cores())
    here = (platform.node(), node.cpu_name(), cores)
    if (machine.name, device.name, device.cores) != here:
        return f"this host is {here[0]}, {cores} cores of {here[1]}"
    if plan.nodes > 1:
        return f"{plan.nodes} nodes are planned"
    if plan.ranks_per_node > MOST_PROCESSES_PER_CORE * cores:
        return f"{plan.ranks_per_node} processes on {cores} cores"
    available = MEMORY_PART * node.memory_bytes()
    if needed_bytes > available:
        return f"it needs {needed_bytes} bytes of memory, of which {available:.0f} may be taken"
    return ""


def refuse_to_measure(machine: Machine, why_not: str) -> UsageError:
    """Return the error of a plan that asks for a measured step where there can be none."""
    return UsageError(
        "the step cannot be measured here",
        where=machine.name,
        why=why_not,
        fix="Plan on the machine itself, or with --compute rates",
    )


def with_warning(by_rates: Estimate, problem: PacelineError) -> Estimate:
    """Return an estimate that says why it rests on rates."""
    why = f": {problem.why}" if problem.why else ""
    text = (
        f"predicted from rates of operator classes, as the step could not be measured: "
        f"{problem.what}{why}"
    )
    return dataclasses.replace(by_rates, warnings=(*by_rates.warnings, text))
