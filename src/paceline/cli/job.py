"""This process's place in the job that started it, for verbs that measure as a rank of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.launch.task_placement import detect
from paceline.probe.job import JobPlace

if TYPE_CHECKING:
    from collections.abc import Mapping

_PORT = 29500  # torch's default
_FIX = (
    "Start it on all ranks with srun, mpirun, torchrun or paceline run -m paceline; or name "
    "numbers of ranks to measure on this host: paceline probe --collectives 2,4"
)


def find_job(environ: Mapping[str, str]) -> JobPlace:
    """Return this process's place in a job of torchrun, paceline run, srun or mpirun.

    Raises:
        UsageError: the process is in no job, or in one of a single rank, or rank 0's host is not
            known.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, ranks = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        init_method = "env://"
        is_known = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    else:
        task = detect(environ)
        if task is None:
            raise UsageError(
                "this process is not a rank of a job",
                where="paceline probe --collectives",
                why="neither RANK and WORLD_SIZE are set, nor is this a task of srun or mpirun",
                fix=_FIX,
            )
        rank, ranks = task.task_number, task.task_count
        address = environ.get("MASTER_ADDR") or task.first_host
        init_method = f"tcp://{address}:{environ.get('MASTER_PORT', _PORT)}"
        is_known = bool(address)
    if ranks < 2:
        raise UsageError(
            f"the job has {ranks} rank: there is nobody to exchange anything with",
            where="paceline probe --collectives",
            fix=_FIX,
        )
    if not is_known:
        raise UsageError(
            "the host of rank 0 is not known",
            where=f"rank {rank} of {ranks}",
            fix="Set MASTER_ADDR and MASTER_PORT, the same on all ranks",
        )
    return JobPlace(rank=rank, ranks=ranks, init_method=init_method)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(
            f"{name} is not a number: '{environ[name]}'", where="environment", fix="Unset it"
        ) from None
