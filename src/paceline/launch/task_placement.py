"""Whether Slurm or mpirun has started this process, and as which task of how many.

A task is one ``paceline run`` process. In a Slurm step and under mpirun each task starts one rank:
the number of ranks is the number of tasks, and asking for another one is refused. With ``--nnodes``
(`nodes.py`) each node has one task, which starts that node's ranks.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # slurm.h: batch scripts, shells of salloc and the like


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPlacement:
    """This task's place among the tasks of a Slurm step, an mpirun call, or ``--nnodes``.

    Attributes:
        source: ``slurm``, ``openmpi``, ``mpich``, or ``nodes`` for ``--nnodes``; for messages.
        task_number: from 0; also the global rank of the task's rank if each task starts one.
        task_count: number of tasks on all nodes.
        local_task_number: this task's number among the tasks of its node.
        local_task_count: number of tasks on this node.
        first_host: the host of rank 0; empty when Slurm or mpirun does not name it.
        job_name: names this Slurm step or mpirun call, the same on all its tasks and on no others;
            empty when unknown.
        identity: by which the tasks recognise each other; empty takes `job_name`.
        port: at which rank 0's task listens; 0 = chosen by Paceline.
        ranks_per_task: ranks that each task starts: 1, or with ``--nnodes`` the ranks of a node.
    """

    source: str
    task_number: int
    task_count: int
    local_task_number: int
    local_task_count: int
    first_host: str = ""
    job_name: str = ""
    identity: str = ""
    port: int = 0
    ranks_per_task: int = 1

    def __post_init__(self) -> None:
        for number, count in (
            (self.task_number, self.task_count),
            (self.local_task_number, self.local_task_count),
        ):
            if not 0 <= number < count:
                raise ValueError(f"task {number} of {count}")

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.task_count * self.ranks_per_task

    @property
    def node_ranks(self) -> int:
        """Ranks on this node."""
        return self.local_task_count * self.ranks_per_task

    @property
    def is_first_of_node(self) -> bool:
        """Whether this is the first task of its node."""
        return self.local_task_number == 0

    @property
    def noun(self) -> str:
        """What messages call a task."""
        return "node" if self.source == "nodes" else "rank"


def detect(environ: Mapping[str, str]) -> TaskPlacement | None:
    """Return this task's place in a Slurm step or under mpirun, or None outside of both.

    Raises:
        UsageError: the environment variables of Slurm or mpirun are not consistent.
    """
    try:
        # mpirun within a Slurm job starts its daemons with srun: the ranks are mpirun's.
        return _openmpi(environ) or _mpich(environ) or _slurm(environ)
    except (KeyError, ValueError) as problem:
        raise UsageError(
            "the environment variables of Slurm or mpirun are not consistent",
            why=f"{type(problem).__name__}: {problem}",
            fix="Start ranks with srun or mpirun, or unset these variables",
        ) from None


def mpirun_descriptors(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the open file descriptors by which an MPI program reaches the mpirun or srun above it.

    A program below several processes can only use what each of them has passed on. Hydra, MPICH's
    mpirun, and Slurm's PMI open one for each rank; Open MPI's processes connect to a socket.
    """
    try:
        descriptor = int(environ["PMI_FD"])
        os.fstat(descriptor)
    except (KeyError, ValueError, OSError):  # none, or an ancestor has closed it
        return ()
    return (descriptor,)


def check_world(task: TaskPlacement, ranks: int | None) -> None:
    """Refuse a number of ranks other than the number of tasks of Slurm or mpirun.

    Raises:
        UsageError: `ranks` is given and differs.
    """
    if ranks is None or ranks == task.task_count or task.source == "nodes":
        return
    start = "srun -n" if task.source == "slurm" else "mpirun -n"
    raise UsageError(
        f"{ranks} ranks were asked for, but this {task.source} step has {task.task_count}",
        where=f"task {task.task_number}",
        why="in a Slurm step and under mpirun each task is one rank",
        fix=f"Leave out -n, or start with {start} {ranks}",
    )


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list such as ``gpu[07-09,12],login``.

    >>> first_host("gpu[07-09,12],login")
    'gpu07'
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?", node_list)
    return match.group(1) + (match.group(2) or "") if match else ""


def _slurm(environ: Mapping[str, str]) -> TaskPlacement | None:
    # A batch script or an interactive shell has tasks, but starts them by itself.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    is_special = int(environ["SLURM_STEP_ID"]) >= _FIRST_SPECIAL_STEP
    if is_special or _is_below_a_shell_at_a_terminal():
        return None
    world_size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    return TaskPlacement(
        source="slurm",
        task_number=int(environ["SLURM_PROCID"]),
        task_count=world_size,
        local_task_number=int(environ["SLURM_LOCALID"]),
        local_task_count=_tasks_on_node(
            per_node, int(environ.get("SLURM_NODEID", "0")), world_size
        ),
        first_host=first_host(environ.get("SLURM_STEP_NODELIST", "")),
        job_name=f"slurm-{environ.get('SLURM_JOB_ID', '0')}.{environ['SLURM_STEP_ID']}",
    )


def _is_below_a_shell_at_a_terminal() -> bool:
    """Return whether a person's shell started this process, as within ``srun --pty bash``.

    The other tasks of such a step have ended. srun gives a terminal to one task, with ``--pty``; a
    shell with job control gives each of its commands a process group, and leads the session itself.
    """
    try:
        return os.isatty(0) and os.getpgid(0) != os.getsid(0)
    except OSError:  # the leader is of another namespace
        return False


def _tasks_on_node(per_node: str, node: int, world_size: int) -> int:
    """Return the tasks of node number `node` from a list such as ``2(x3),1``."""
    counts: list[int] = []
    for part in per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts[node] if node < len(counts) else world_size


def _openmpi(environ: Mapping[str, str]) -> TaskPlacement | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    return TaskPlacement(
        source="openmpi",
        task_number=int(environ["OMPI_COMM_WORLD_RANK"]),
        task_count=int(environ["OMPI_COMM_WORLD_SIZE"]),
        local_task_number=int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
        local_task_count=int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        job_name=environ.get("PMIX_NAMESPACE", ""),
    )


def _mpich(environ: Mapping[str, str]) -> TaskPlacement | None:
    if "PMI_RANK" not in environ or "MPI_LOCALRANKID" not in environ:
        return None
    return TaskPlacement(
        source="mpich",
        task_number=int(environ["PMI_RANK"]),
        task_count=int(environ["PMI_SIZE"]),
        local_task_number=int(environ["MPI_LOCALRANKID"]),
        local_task_count=int(environ["MPI_LOCALNRANKS"]),
    )
