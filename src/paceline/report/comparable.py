"""Whether an Estimate and a run, or two runs, belong together: what a comparison is worth.

What a run was is taken from its own evidence: its traces, its configuration, and the machine that
it kept. Evidence that a run of an earlier Paceline did not leave is passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.record import digest
from paceline.report.units import format_bytes, plural
from paceline.trace.analysis.counters import trained_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.estimate import Estimate
    from paceline.trace.analysis.communication import Traffic
    from paceline.trace.efficiency.comparison import RunSeries
    from paceline.trace.merge import Trace

# Tolerance of the ratio of bytes reduced per step to the gradients' bytes. The ratio is k if
# gradients are reduced k times per step, and larger if the script reduces numbers of its own.
TOLERANCE = 0.05
_ALLOCATOR = {"own": "one that its environment set"}


def difference(
    estimate: Estimate,
    trace: Trace,
    traffic: Sequence[Traffic],
    *,
    steps: int,
    config: dict[str, Any],
    machine: dict[str, Any],
) -> str:
    """Return how the run differs from what was predicted; empty if nothing says that it does.

    Args:
        estimate: the prediction.
        trace: the run's events.
        traffic: the run's collectives.
        steps: that every rank completed.
        config: the run's ``config.json``.
        machine: the run's ``machine.json`` as it was written; empty if there is none.
    """
    plan = estimate.plan
    if plan.mesh.world_size != trace.world_size:
        ranks = plural(plan.mesh.world_size, "rank")
        return f"the prediction is of {ranks}, the run had {trace.world_size}"
    threads = config.get("threads")
    if isinstance(threads, int) and plan.threads != threads:
        planned = plural(plan.threads, "thread")
        return f"the prediction is of {planned} per rank, the run had {threads}"
    allocator = config.get("allocator")
    used = allocator.get("in_effect") if isinstance(allocator, dict) else None
    if isinstance(used, str) and plan.allocator != used:
        had = _ALLOCATOR.get(used, used)
        return f"the prediction is for allocator {plan.allocator}, the run had {had}"
    collectives = config.get("collectives")
    if isinstance(collectives, str) and plan.collectives != collectives:
        return f"the prediction is for collectives {plan.collectives}, the run had {collectives}"
    nodes = len({rank.status.boot_id for rank in trace.ranks})
    if not trace.missing_ranks and plan.nodes != nodes:
        return f"the prediction is of {plural(plan.nodes, 'node')}, the run had {nodes}"
    return machine_difference(
        estimate, digest(machine) if machine else "", str(machine.get("name", ""))
    ) or _model_difference(estimate, trace, traffic, steps)


def unlike_runs(
    a: RunSeries, b: RunSeries, a_config: Mapping[str, Any], b_config: Mapping[str, Any]
) -> str:
    """Return how the programs or the models of two runs differ; empty if nothing says so.

    Args:
        a: run A.
        b: run B.
        a_config: its ``config.json``.
        b_config: that of run B.
    """
    found = []
    a_program, b_program = (str(config.get("script", "")) for config in (a_config, b_config))
    if a_program and b_program and Path(a_program).name != Path(b_program).name:
        found.append(f"A ran {a_program}, B {b_program}")
    if a.trained_bytes and b.trained_bytes and a.trained_bytes != b.trained_bytes:
        sizes = (f"{size:,}" for size in (a.trained_bytes, b.trained_bytes))
        found.append("A trained {} bytes of parameters, B {}".format(*sizes))
    return "; ".join(found)


def machine_difference(estimate: Estimate, machine_digest: str, name: str) -> str:
    """Return how a run's machine differs from the one predicted; empty if it does not.

    Args:
        estimate: the prediction.
        machine_digest: of the run's machine, as its file was written; empty if there is none.
        name: of that machine.
    """
    if not machine_digest or not estimate.machine_digest:
        return ""
    if estimate.machine_digest == machine_digest:
        return ""
    digests = (estimate.machine_digest, machine_digest)
    planned, used = (text.partition(":")[2][:8] for text in digests)
    if estimate.machine != name:
        return f"the prediction is for machine {estimate.machine}, the run was on {name}"
    return (
        f"the prediction is from another measurement of machine {name} ({planned}) than the one "
        f"that the run kept ({used}): give paceline plan and paceline run the same --machine"
    )


def _model_difference(
    estimate: Estimate, trace: Trace, traffic: Sequence[Traffic], steps: int
) -> str:
    stages = [stage.trained_bytes for stage in estimate.stages]  # each rank updates those of one
    expected = max(stages, default=estimate.trained_parameter_bytes)
    trained = max((trained_bytes(rank) for rank in trace.ranks), default=0)
    if trained:
        if trained == expected:
            return ""
        return (
            f"the prediction is of a model with {format_bytes(expected)} of trained parameters, "
            f"the run trained {format_bytes(trained)}"
        )
    if stages:
        return ""
    reduced = sum(line.bytes for line in traffic if line.operation == "all_reduce")
    if trace.world_size < 2 or not reduced or not steps or not expected:
        return ""
    per_step = reduced / steps
    times = per_step / expected
    if round(times) >= 1 and abs(times - round(times)) <= TOLERANCE:
        return ""
    return (
        f"the prediction is of {format_bytes(expected)} of gradients per step, the run reduced "
        f"{format_bytes(per_step)}"
    )
