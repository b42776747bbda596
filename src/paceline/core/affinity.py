"""One CPU budget: which of a node's allowed cores each rank gets, and with how many threads.

Ranks that each start a thread per core fight for cores and wait for each other; ranks on disjoint
cores do not. The shares are contiguous, so that neighbours in numbering (usually in cache and
memory too) stay together, and differ by at most one core.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreBinding:
    """The cores that one rank is bound to, none = unbound, and its number of compute threads."""

    cores: tuple[int, ...]
    threads: int


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


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
        Disjoint cores per rank; when ranks outnumber cores, ranks share and stay unbound.
    """
    assert 0 <= local_rank < local_world_size
    wanted = environ.get("OMP_NUM_THREADS", "").split(",")[0]  # then come those of nested levels
    if wanted.isdecimal() and int(wanted) > 0:
        return CoreBinding(cores=(), threads=int(wanted))
    if local_world_size > len(cores):
        return CoreBinding(cores=(), threads=1)
    each, rest = divmod(len(cores), local_world_size)
    begin = local_rank * each + min(local_rank, rest)
    bound = tuple(cores[begin : begin + each + (local_rank < rest)])
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


def bind_threads(cores: Sequence[int]) -> None:
    """Bind all threads of this process to cores; those that it starts later inherit them."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task.name), cores)
