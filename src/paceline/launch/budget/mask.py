"""Whether the cores that Slurm, mpirun or a control group leave to a run suffice; what would.

A step of Slurm gets one core per task where nothing else is asked for, and since version 22.05 srun
does not take ``--cpus-per-task`` from the job's script; Open MPI binds each task of a small job to
one core. Either way the loader workers of a rank are squeezed onto its one core, beside idle ones.

Source: sbatch(1) and srun(1), --cpus-per-task; mpirun(1) of Open MPI, "Mapping, Ranking, and
Binding".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.node import Limits
    from paceline.launch.task_placement import TaskPlacement

WANTED_CORES = 3  # of a rank: its main thread and two loader workers


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskProblem:
    """What is wrong with the cores of a run.

    Attributes:
        what: a sentence.
        fix: the line that would change it; empty if none is known.
        binds: whether ranks can be bound all the same.
    """

    what: str
    fix: str = ""
    binds: bool = False


def check_mask(
    allowed: int,
    ranks: int,
    *,
    total: int,
    limits: Limits,
    environ: Mapping[str, str],
    task: TaskPlacement | None = None,
) -> MaskProblem | None:
    """Return what is wrong with the cores that the ranks of a node share, or None.

    Args:
        allowed: cores in the affinity mask that these ranks share.
        ranks: that share them.
        total: cores of the node.
        limits: of the control groups.
        environ: with Slurm's variables.
        task: the place of this launcher among several; None if it starts all ranks.
    """
    if limits.cores is not None and limits.cores < allowed:
        return MaskProblem(
            what=f"a control group allows the time of {limits.cores:g} cores on {allowed}: ranks "
            "have threads for that time, and are not bound, as other groups use the same cores",
            fix="" if limits.cores >= ranks else f"Ask for the CPU time of at least {ranks} cores",
        )
    if allowed < ranks:
        return MaskProblem(
            what=f"{ranks} ranks share {_cores(allowed)}",
            fix=_enough(ranks, total, environ, task),
        )
    reachable = _allocated(environ) or (total if task and task.source == "openmpi" else 0)
    on_node = task.node_ranks if task else ranks
    if allowed // ranks < WANTED_CORES and reachable // on_node > allowed // ranks:
        each = reachable // on_node
        return MaskProblem(
            what=f"each rank may use {_cores(allowed // ranks)} of the {each} that are there for it"
            ": its loader workers share them",
            fix=_enough(on_node, reachable, environ, task, each=each),
            binds=True,
        )
    return None


def _cores(count: int) -> str:
    return f"{count} core{'s' if count != 1 else ''}"


def _allocated(environ: Mapping[str, str]) -> int:
    """Return the cores of this node that Slurm has given to the job; 0 outside of Slurm."""
    text = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def _enough(
    ranks: int,
    cores: int,
    environ: Mapping[str, str],
    task: TaskPlacement | None,
    *,
    each: int | None = None,
) -> str:
    """Return the line that gives each rank cores of its own, of the `cores` that there are."""
    each = each or max(1, cores // ranks)
    if task is not None and task.source in ("openmpi", "mpich"):
        if task.source == "openmpi":
            return f"mpirun --map-by slot:pe={each} --bind-to core"
        return f"mpirun -bind-to core:{each}"
    if "SLURM_JOB_ID" not in environ:
        return ""
    if task is not None and task.source == "slurm":  # a task is a rank
        given = environ.get("SLURM_CPUS_PER_TASK", "")
        if given.isdecimal() and int(given) >= each:  # the job has them, its step has not
            return "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, before srun"
        return f"#SBATCH --cpus-per-task={each}, and srun --cpus-per-task={each}"
    return f"#SBATCH --cpus-per-task={ranks * each}"  # one task starts all ranks of the node
