"""Applies a Plan to a run: refuses contradictions, warns of values that only a script can set.

An unchanged script can be given ranks, threads and DDP's bucket sizes from outside. Precision and
loader workers are set in the script's own code: of a plan with such values the run follows the
rest, and one warning names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.errors import UsageError
from paceline.launch.program import ProgramKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.config import Resolved
    from paceline.core.plan import Plan
    from paceline.launch.task_placement import TaskPlacement

# Fields of a plan that a run cannot set from outside.
_ONLY_SCRIPT = (
    "precision",
    "loader_workers",
    "engine",
    "zero",
    "recompute",
    "compiled",
    "compression",
)


def check_plan(
    plan: Plan,
    resolved: Resolved[Any],
    task: TaskPlacement | None,
    environ: Mapping[str, str],
) -> None:
    """Raise an error if a setting contradicts the plan.

    Args:
        plan: the plan that the run follows.
        resolved: the run's configuration, where ``ranks`` may be set.
        task: this task's place under Slurm or mpirun; None outside of both.
        environ: the environment variables, where OMP_NUM_THREADS may be set.

    Raises:
        UsageError: the plan needs tensor or context parallelism or several stages for each rank,
            or a setting, the environment, Slurm or mpirun says otherwise; the message names both.
    """
    _check_axes(plan)
    ranks = resolved.config.ranks
    if ranks is not None and ranks * resolved.config.nnodes != plan.mesh.world_size:
        place = _place(resolved, "ranks")
        axes = "mesh.data" if plan.mesh.pipeline == 1 else "mesh.data x mesh.pipeline"
        raise _conflict(place, ranks, f"number of ranks ({axes})", plan.mesh.world_size)
    _check_same(plan, resolved, "allocator")
    _check_same(plan, resolved, "collectives")
    threads = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if threads and threads != str(plan.threads):
        raise _conflict("OMP_NUM_THREADS", threads, "threads", plan.threads)
    if task is None and plan.nodes > 1:
        raise UsageError(
            f"the plan spreads its ranks over {plan.nodes} nodes",
            where="--plan",
            why="without Slurm, mpirun or --nnodes a run has only this node",
            fix="Start it with srun, mpirun or --nnodes, or plan for 1 node",
        )
    if task is not None and task.node_ranks != plan.ranks_per_node:
        here = f"the {task.source} step's ranks per node"
        raise _conflict(here, task.node_ranks, "ranks_per_node", plan.ranks_per_node)


def _check_axes(plan: Plan) -> None:
    """Raise an error if ranks would share what Paceline's runtime does not share out."""
    for axis in ("tensor", "context"):
        if (count := getattr(plan.mesh, axis)) > 1:
            raise UsageError(
                f"the plan's mesh has {count} ranks along the axis {axis}",
                where="--plan",
                why="paceline run follows plans of data and pipeline parallelism only",
                fix=f"Set mesh.{axis} to 1 in the plan file, or write a new one with "
                "`paceline plan --out`",
            )
    if plan.stages_per_rank > 1:
        raise UsageError(
            f"the plan has {plan.stages_per_rank} stages for each rank of the pipeline",
            where="--plan",
            why="paceline run follows pipelines with one stage for each rank",
            fix="Plan without --interleave",
        )


def _check_same(plan: Plan, resolved: Resolved[Any], name: str) -> None:
    """Raise an error if a setting that the user gave is not the plan's."""
    chosen, planned = getattr(resolved.config, name), getattr(plan, name)
    if resolved.provenance[name] != "default" and chosen != planned:
        raise _conflict(_place(resolved, name), chosen, name, planned)


def _place(resolved: Resolved[Any], name: str) -> str:
    """Return where the setting `name` has its value from, as the user wrote it."""
    provenance = resolved.provenance[name]
    places = {
        "flag": f"--{name}",
        "file": "paceline.toml",
        "environment": f"PACELINE_RUN__{name.upper()}",
    }
    return places.get(provenance, provenance)


def plan_warnings(plan: Plan, kind: ProgramKind) -> tuple[str, ...]:
    """Return a line for the plan's values that only the script can set, and for those unreachable.

    DDP's buckets are set in the Python process that is the rank: the processes of a program that is
    not Python keep torch's sizes.
    """
    default = type(plan)()
    buckets = (plan.bucket_bytes, plan.first_bucket_bytes)
    lost: tuple[str, ...] = ()
    is_python = kind is not ProgramKind.EXECUTABLE
    if not is_python and buckets != (default.bucket_bytes, default.first_bucket_bytes):
        lost = ("the plan's bucket sizes do not reach a program that is not Python",)
    names = [
        f"{name} = {getattr(plan, name)}"
        for name in _ONLY_SCRIPT
        if getattr(plan, name) != getattr(default, name)
    ]
    if plan.mesh.pipeline > 1:
        names.append(f"mesh.pipeline = {plan.mesh.pipeline}")
    elif plan.microbatch_count > 1:
        names.append(f"microbatches = {plan.microbatch_count}")
    if not names:
        return lost
    return (
        *lost,
        f"the plan has {', '.join(names)}: only the script itself can set that, or "
        "paceline.training.prepare in it",
    )


def _conflict(place: str, value: object, field: str, planned: object) -> UsageError:
    return UsageError(
        f"{place} is {value}, the plan's {field} is {planned}",
        where=f"{place} and --plan",
        fix="Leave one of the two out, or make them agree",
    )
