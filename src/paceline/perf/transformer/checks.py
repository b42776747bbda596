"""Whether a plan fits a transformer, a batch and a machine, before its step is predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture


def check(machine: Machine, model: Architecture, plan: Plan, batch: int) -> float:
    """Return the samples of a microbatch.

    Raises:
        UsageError: the plan does not fit the model, the batch or the machine.
    """
    mesh = plan.mesh
    where = f"mesh {mesh.data} x {mesh.pipeline} x {mesh.tensor} (data x pipeline x tensor)"
    stages = mesh.pipeline * plan.stages_per_rank
    if not machine.devices:
        raise UsageError("the machine has no device", where=machine.name, fix="Describe one")
    devices = plan.nodes * machine.devices[0].count
    if mesh.world_size > devices:
        raise UsageError(
            f"{mesh.world_size} ranks need as many devices, {plan.nodes} nodes have {devices}",
            where=where,
            fix=f"Plan with --nodes {-(-mesh.world_size // machine.devices[0].count)} or more",
        )
    if stages > model.layers:
        raise UsageError(
            f"{model.layers} layers cannot be cut into {stages} stages",
            where=where,
            fix="Plan with fewer stages",
        )
    if model.heads % mesh.tensor:
        raise UsageError(
            f"{mesh.tensor} tensor-parallel ranks do not divide {model.heads} heads",
            where=where,
            fix="Plan with a number of ranks that divides them",
        )
    if plan.layers and sum(plan.layers) != model.layers:
        raise UsageError(
            f"the stages have {sum(plan.layers)} layers, the model {model.layers}",
            where=where,
            fix="Leave the plan's layers empty, or make them add up",
        )
    if plan.compression > 1 and plan.zero:
        raise UsageError(
            f"gradients that ZeRO-{plan.zero} shares out are not compressed",
            where=f"paceline plan --compression {plan.compression:g} --zero {plan.zero}",
            why="a residual is kept of each gradient as a whole",
            fix="Plan with --zero 0, or leave --compression out",
        )
    return plan.microbatch_samples(batch)
