"""Cores of processes and threads: which this process may use, and how ranks divide a node's.

Ranks that each start a thread per core fight for cores and wait for each other; ranks on disjoint
cores do not. The shares here are contiguous in the numbering and equally large, since ranks that
step together are as fast as the one with the fewest cores. `launch.budget` divides the cores of a
run further, by the node's topology and by what a rank's threads and processes are for.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What a rank's budget says to code that knows nothing of the launcher: lists of cores (`core_list`)
# for loader workers and for servers of the node, and the workers' nice value. Not PACELINE_: that
# would be settings of the user's.
LOADER_CORES_VARIABLE = "_PACELINE_LOADER_CORES"
LOADER_NICE_VARIABLE = "_PACELINE_LOADER_NICE"
SERVER_CORES_VARIABLE = "_PACELINE_SERVER_CORES"
NICE_MAX = 19  # the lowest priority (sched(7))


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreBinding:
    """The cores that one rank is bound to, none = unbound, and its number of compute threads."""

    cores: tuple[int, ...]
    threads: int


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def parse_core_list(text: str) -> tuple[int, ...]:
    """Return the cores of a list in the kernel's format (cpuset(7)).

    Raises:
        ValueError: it is no such list.

    >>> parse_core_list("0-2,8")
    (0, 1, 2, 8)
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end:
            raise ValueError(f"{part!r} is no range of cores")
        cores.update(range(begin, end + 1))
    return tuple(sorted(cores))


def core_list(cores: Iterable[int]) -> str:
    """Return the list of `cores` in the kernel's format.

    >>> core_list([0, 1, 2, 8])
    '0-2,8'
    """
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{begin}-{end}" if end > begin else str(begin) for begin, end in ranges)


def threads_of_environment(environ: Mapping[str, str]) -> int | None:
    """Return the number of threads that the user has set by OMP_NUM_THREADS; None without."""
    wanted = environ.get("OMP_NUM_THREADS", "").split(",")[0]  # then come those of nested levels
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else None


def core_binding(
    cores: Sequence[int], local_rank: int, local_world_size: int, environ: Mapping[str, str]
) -> CoreBinding:
    """Return the binding of one rank of a node.

    Args:
        cores: that the node's ranks may use together.
        local_rank: 0 to `local_world_size` - 1.
        local_world_size: ranks on this node.
        environ: where OMP_NUM_THREADS set by the user wins: then ranks keep that count and stay
            unbound, as under torchrun.

    Returns:
        Disjoint cores per rank, as many for each; when ranks outnumber cores, ranks share and stay
        unbound.
    """
    assert 0 <= local_rank < local_world_size
    if (wanted := threads_of_environment(environ)) is not None:
        return CoreBinding(cores=(), threads=wanted)
    if local_world_size > len(cores):
        return CoreBinding(cores=(), threads=1)
    each = len(cores) // local_world_size
    bound = tuple(cores[local_rank * each : (local_rank + 1) * each])
    return CoreBinding(cores=bound, threads=len(bound))


def planned_cores(
    cores: Sequence[int], local_rank: int, local_world_size: int, threads: int
) -> tuple[int, ...]:
    """Return the cores of one rank of a node, where a plan gives its number of compute threads.

    Returns:
        Its share of `cores`; none = unbound, where it has more threads than cores of its own.
    """
    own = core_binding(cores, local_rank, local_world_size, environ={}).cores
    return own if len(own) >= threads else ()


def thread_ids(process: int | str = "self") -> set[int]:
    """Return the ids of the threads of a process; none of one that has ended."""
    try:
        return {int(task.name) for task in Path(f"/proc/{process}/task").iterdir()}
    except OSError:
        return set()


def bind_threads(
    cores: Iterable[int], threads: Iterable[int] | None = None, *, nice: int = 0
) -> None:
    """Bind threads to cores; those that they start later inherit them.

    Args:
        cores: none leaves the cores as they are.
        threads: their ids, that of a process for its main thread; None: all of this process.
        nice: what is added to their nice value; above 0 they are scheduled as batch work, too,
            which does not preempt other threads when it wakes (sched(7), SCHED_BATCH).
    """
    cores = tuple(cores)
    for thread in thread_ids() if threads is None else threads:
        # A thread has ended meanwhile, or a control group has taken cores away.
        with contextlib.suppress(OSError):
            if cores:
                os.sched_setaffinity(thread, cores)
            if nice > 0:
                lowered = min(NICE_MAX, os.getpriority(os.PRIO_PROCESS, thread) + nice)
                os.setpriority(os.PRIO_PROCESS, thread, lowered)
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def place_loader_workers(environ: Mapping[str, str], threads: Iterable[int]) -> None:
    """Give loader workers their cores and priority, as the rank's budget in `environ` says."""
    cores = environ.get(LOADER_CORES_VARIABLE)
    if cores is not None:
        nice = int(environ.get(LOADER_NICE_VARIABLE, "0"))
        bind_threads(parse_core_list(cores), threads, nice=nice)
