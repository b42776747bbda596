"""Chooses the way of a group's calls, by where its ranks are.

all ranks on one host              HostPath       shared memory
hosts with as many ranks each      ShardedPath    shared memory, then gloo between all ranks
hosts with different numbers       LeaderPath     shared memory, then gloo between first ranks
one rank per host                  none           gloo; with another type on the wire: ShardedPath

With ``between_hosts = mpi``, MPI takes gloo's place, with one rank per host too.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.collectives.host_group import HostGroup
from paceline.collectives.host_path import HostPath
from paceline.collectives.hosts import exchange, find_hosts, release_first_rank
from paceline.collectives.leader import LeaderPath
from paceline.collectives.settings import common_settings
from paceline.collectives.sharded import ShardedPath
from paceline.collectives.two_level import HostPlace
from paceline.core.errors import Missing, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from paceline.collectives.options import CollectivesConfig
    from paceline.collectives.settings import GroupSettings
    from paceline.collectives.two_level import TwoLevelPath


def make_path(
    store: Any,
    rank: int,
    members: tuple[int, ...],
    timeout_s: float,
    config: CollectivesConfig | None = None,
) -> Any:
    """Return the way of a group's calls, a HostPath or TwoLevelPath; none where gloo has all.

    Every rank of the group calls this; all get the same kind of path.

    Args:
        store: torch's store, where the ranks find each other.
        rank: this rank within the group.
        members: the global ranks of the group, in order of their rank in it.
        timeout_s: the longest wait for another rank.
        config: in place of what file and environment say; rank 0's holds for all ranks.

    Raises:
        DeadlineExceeded: a rank did not come; the error names it.
        UsageError: a setting of rank 0, or its machine file, is not valid.
    """
    own, size = dist.PrefixStore("paceline/", store), len(members)
    hosts = find_hosts(own, rank, size, timeout_s)
    # On one host they change nothing; yet a misspelt one must not wait for the cluster to show.
    settings = common_settings(own, rank, len(hosts), size, timeout_s, config)
    if len(hosts) == 1:
        return HostPath(HostGroup.form(own, rank, size, timeout_s), members)
    sent = (settings.config.wire, settings.config.between_hosts)
    if len(hosts) == size and sent == ("same", "gloo"):
        return None
    return two_levels(own, hosts, rank, members, timeout_s, settings)


def two_levels(
    store: Any,
    hosts: Sequence[Sequence[int]],
    rank: int,
    members: tuple[int, ...],
    timeout_s: float,
    settings: GroupSettings,
) -> TwoLevelPath:
    """Return the path of a group on several hosts; every rank of the group calls this.

    Args:
        store: where the ranks find each other.
        hosts: the group ranks of each host.
        rank: this rank within the group.
        members: the global ranks of the group, in order of their rank in it.
        timeout_s: the longest wait for another rank.
        settings: the same on all ranks.
    """
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    ranks = hosts[host]
    place = HostPlace(tuple(map(tuple, hosts)), host, ranks.index(rank))
    group = HostGroup.form(
        dist.PrefixStore(f"host {host}/", store), place.local_rank, len(ranks), timeout_s
    )
    is_even = len(set(map(len, hosts))) == 1
    if settings.config.between_hosts == "mpi":
        _require_mpi(store, rank, members, timeout_s)
    cross = None
    if is_even or place.local_rank == 0:
        cross = _exchange(store, place, members, timeout_s, settings.config)
    release_first_rank(store, "formed", rank, len(members), timeout_s)
    path = (ShardedPath if is_even else LeaderPath)(place, group, members, cross, settings)
    if settings.config.between_hosts == "mpi":
        path.messages = _mpi("messages").MpiMessages(members)
    return path


def _exchange(
    store: Any,
    place: HostPlace,
    members: tuple[int, ...],
    timeout_s: float,
    config: CollectivesConfig,
) -> Any:
    """Return what exchanges data between the ranks with this rank's index on their hosts."""
    index = place.local_rank
    if config.between_hosts == "mpi":
        return _mpi("exchange").MpiExchange([members[ranks[index]] for ranks in place.hosts])
    own = dist.PrefixStore(f"index {index}/", store)
    wait = timedelta(seconds=timeout_s)
    return c10d.ProcessGroupGloo(own, place.host, len(place.hosts), wait)


def _require_mpi(store: Any, rank: int, members: tuple[int, ...], timeout_s: float) -> None:
    """Raise the same error on all ranks unless MPI can serve all of them.

    Raises:
        UsageError: it cannot; the error has the reason of the first rank that has one.
        DeadlineExceeded: a rank did not come.
    """
    try:
        problem = str(_mpi("exchange").problem_of_mpi(members[rank]))
    except Missing as missing:
        problem = f"{missing.what}: {missing.why}"
    problems = exchange(store, "mpi", rank, len(members), problem.encode(), timeout_s)
    for member, text in zip(members, problems, strict=True):
        if text:
            raise UsageError(
                "MPI cannot carry data between hosts",
                where=f"rank {member}, with between_hosts = mpi",
                why=text.decode(),
                fix="Start the ranks by MPI's launcher (mpirun, srun), or leave this to gloo",
            )


def _mpi(part: str) -> ModuleType:
    """Return a module that loads MPI; importlib, because most jobs have none."""
    return importlib.import_module(f"paceline.collectives.transports.mpi_{part}")
