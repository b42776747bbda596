"""Whether Slurm or mpirun has started this process, and as which rank of how many.

Inside such an allocation each task starts one rank: the world is what the allocation says, and
asking for another size is refused. An allocation of ``--nnodes`` (`nodes.py`) has one task per
node, which starts that node's ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # slurm.h: batch scripts, shells of salloc and the like


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """This task's place among the tasks of a Slurm step, an mpirun call, or ``--nnodes``.

    Attributes:
        source: ``slurm``, ``openmpi``, ``mpich``, or ``nodes`` for ``--nnodes``; for messages.
        rank: number of the task; also its global rank if each task starts one rank.
        world_size: number of tasks on all nodes.
        local_rank: this task's number among the tasks of its node.
        local_world_size: number of tasks on this node.
        first_host: the host of rank 0; empty when Slurm or mpirun does not name it.
        name: names this Slurm step or mpirun call, the same on all its tasks and on no others;
            empty when unknown.
        identity: by which the tasks recognise each other; empty takes `name`.
        port: at which rank 0's task listens; 0 = chosen by Paceline.
        ranks_per_task: ranks that each task starts: 1, or with ``--nnodes`` the ranks of a node.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    first_host: str = ""
    name: str = ""
    identity: str = ""
    port: int = 0
    ranks_per_task: int = 1

    def __post_init__(self) -> None:
        for place, count in (
            (self.rank, self.world_size),
            (self.local_rank, self.local_world_size),
        ):
            if not 0 <= place < count:
                raise ValueError(f"task {place} of {count}")

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return self.world_size * self.ranks_per_task

    @property
    def local_ranks(self) -> int:
        """Ranks on this node."""
        return self.local_world_size * self.ranks_per_task

    @property
    def noun(self) -> str:
        """What messages call a task."""
        return "node" if self.source == "nodes" else "rank"


def detect(environ: Mapping[str, str]) -> Allocation | None:
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


def check_world(allocation: Allocation, ranks: int | None) -> None:
    """Refuse a number of ranks other than the allocation's.

    Raises:
        UsageError: `ranks` is given and differs.
    """
    if ranks is None or ranks == allocation.world_size or allocation.source == "nodes":
        return
    start = "srun -n" if allocation.source == "slurm" else "mpirun -n"
    raise UsageError(
        f"{ranks} ranks were asked for, but this {allocation.source} step has "
        f"{allocation.world_size}",
        where=f"task {allocation.rank}",
        why="inside an allocation each task is one rank",
        fix=f"Leave out -n, or start with {start} {ranks}",
    )


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list such as ``gpu[07-09,12],login``.

    >>> first_host("gpu[07-09,12],login")
    'gpu07'
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?", node_list)
    return match.group(1) + (match.group(2) or "") if match else ""


def _slurm(environ: Mapping[str, str]) -> Allocation | None:
    # A batch script or an interactive shell has tasks, but starts them by itself.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    if int(environ["SLURM_STEP_ID"]) >= _FIRST_SPECIAL_STEP:
        return None
    world_size = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    return Allocation(
        source="slurm",
        rank=int(environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=_tasks_on_node(
            per_node, int(environ.get("SLURM_NODEID", "0")), world_size
        ),
        first_host=first_host(environ.get("SLURM_STEP_NODELIST", "")),
        name=f"slurm-{environ.get('SLURM_JOB_ID', '0')}.{environ['SLURM_STEP_ID']}",
    )


def _tasks_on_node(per_node: str, node: int, world_size: int) -> int:
    """Return the tasks of node number `node` from a list such as ``2(x3),1``."""
    counts: list[int] = []
    for part in per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts[node] if node < len(counts) else world_size


def _openmpi(environ: Mapping[str, str]) -> Allocation | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    return Allocation(
        source="openmpi",
        rank=int(environ["OMPI_COMM_WORLD_RANK"]),
        world_size=int(environ["OMPI_COMM_WORLD_SIZE"]),
        local_rank=int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
        local_world_size=int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        name=environ.get("PMIX_NAMESPACE", ""),
    )


def _mpich(environ: Mapping[str, str]) -> Allocation | None:
    if "PMI_RANK" not in environ or "MPI_LOCALRANKID" not in environ:
        return None
    return Allocation(
        source="mpich",
        rank=int(environ["PMI_RANK"]),
        world_size=int(environ["PMI_SIZE"]),
        local_rank=int(environ["MPI_LOCALRANKID"]),
        local_world_size=int(environ["MPI_LOCALNRANKS"]),
    )
