"""Starts and ends the job's process group, and says which rank this is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.collectives.registration import NAME, register
from paceline.core.config import environment
from paceline.core.errors import UsageError
from paceline.core.processes import boot_id

if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables of a rank and of the number of ranks: torchrun and paceline run, Open MPI, MPICH and
# Intel MPI, Slurm.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


@dataclass(slots=True)
class _Job:
    """What `init` found out; the process is in one job at a time.

    Attributes:
        hosts: the ranks of each host, in order of their first rank; None before `init`.
        owns_group: whether `init` made the process group, so that `shutdown` ends it.
    """

    hosts: list[list[int]] | None = None
    owns_group: bool = False


_job = _Job()


def init() -> None:
    """Join the job; every rank calls this. A second call does nothing.

    Raises:
        UsageError: there are several ranks, and no address of rank 0.
    """
    if _job.hosts is not None:
        return
    if not dist.is_initialized():
        _make_group(environment())
        _job.owns_group = True
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, boot_id())
    _job.hosts = [
        [rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)
    ]


def _make_group(environ: Mapping[str, str]) -> None:
    register()
    rank, size = find_rank(environ)
    if size == 1:
        dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=1)
        return
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        raise UsageError(
            f"rank {rank} of {size} does not know where rank 0 listens",
            where="hvd.init",
            why="MASTER_ADDR and MASTER_PORT are not set",
            fix="Start the script with `paceline run` or torchrun, or set both variables: the host "
            "of rank 0, and a free port there",
        )
    address = f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    dist.init_process_group(NAME, init_method=address, rank=rank, world_size=size)


def find_rank(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as the launcher says; (0, 1) if none.

    >>> find_rank({"PMI_RANK": "3", "PMI_SIZE": "4"})
    (3, 4)
    """
    for rank, size in _LAUNCHERS:
        if rank in environ and size in environ:
            return int(environ[rank]), int(environ[size])
    return 0, 1


def shutdown() -> None:
    """Leave the job; ends the process group if `init` made it."""
    if _job.owns_group and dist.is_initialized():
        dist.destroy_process_group()
    _job.hosts, _job.owns_group = None, False


def is_initialized() -> bool:
    """Return whether `init` was called, and not `shutdown` after it."""
    return _job.hosts is not None


def rank() -> int:
    """Return this process's rank in the job."""
    _hosts()
    return int(dist.get_rank())


def size() -> int:
    """Return the number of ranks of the job."""
    _hosts()
    return int(dist.get_world_size())


def local_rank() -> int:
    """Return this process's number among the ranks of its host."""
    return _own_host().index(rank())


def local_size() -> int:
    """Return the number of ranks on this host."""
    return len(_own_host())


def cross_rank() -> int:
    """Return the number of this host among those that have a rank of this local rank."""
    return [host for host in _hosts() if len(host) > local_rank()].index(_own_host())


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return len([host for host in _hosts() if len(host) > local_rank()])


def _own_host() -> list[int]:
    return next(host for host in _hosts() if rank() in host)


def _hosts() -> list[list[int]]:
    if _job.hosts is None:
        raise UsageError("the job is not initialized", where="horovod", fix="Call hvd.init() first")
    return _job.hosts
