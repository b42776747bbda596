"""Which ranks share a host: gradients are dense inside a host, and sparse between hosts.

::

    host 0:  rank 0   rank 1        inside: the ranks of a host
             column 0 column 1
    host 1:  rank 2   rank 3        across: the ranks of a column, one of each host

Each column compresses some of the parameters, so that the ranks of a host share that work, its
state and the network's interface. Hosts with more ranks than others have ranks without a column,
which only receive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.collectives.hosts import find_hosts
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeGroups:
    """This rank's place, and its groups, which nothing else communicates in.

    Attributes:
        ranks: of all hosts.
        hosts: number of hosts.
        columns: ranks of a host that compress.
        column: of this rank; None if it only receives.
        inside: the ranks of this host; None if there is one.
        across: the ranks of this column; None if there is one.
        peers: global ranks of this host; the first ones have the columns 0, 1 ...
    """

    ranks: int = 1
    hosts: int = 1
    columns: int = 1
    column: int | None = 0
    inside: ProcessGroup | None = None
    across: ProcessGroup | None = None
    peers: tuple[int, ...] = (0,)


def form(group: ProcessGroup | None, hosts: Sequence[Sequence[int]] | None) -> ExchangeGroups:
    """Make the groups in which ranks exchange; all ranks of `group` call this together.

    Args:
        group: of the ranks; None for all ranks, or for one process without a process group.
        hosts: ranks of `group` by host; None: each rank is a host of its own.

    Raises:
        UsageError: `hosts` does not name each rank of the group once.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ExchangeGroups()
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    hosts = [[peer] for peer in range(ranks)] if hosts is None else hosts
    if sorted(peer for host in hosts for peer in host) != list(range(ranks)):
        raise UsageError(
            f"hosts must name each of {ranks} ranks once",
            where=f"rank {rank}",
            why=f"got {[list(host) for host in hosts]}",
            fix="Give the ranks of each host, or find_hosts=True",
        )
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    own = next(host for host in hosts if rank in host)
    columns = min(map(len, hosts))
    place = list(own).index(rank)
    column = place if place < columns else None
    across = [] if column is None else [members[host[column]] for host in hosts]
    return ExchangeGroups(
        ranks=ranks,
        hosts=len(hosts),
        columns=columns,
        column=column,
        inside=_group_of([members[peer] for peer in own]),
        across=_group_of(across or [members[rank]]),
        peers=tuple(members[peer] for peer in own),
    )


def hosts_of(group: ProcessGroup | None) -> list[list[int]]:
    """Return the ranks of a group by host, where ranks that share memory are of one host.

    Raises:
        DeadlineExceeded: a rank did not take part.
    """
    # A store of its own for each search: a name in a store serves once.
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    own = dist.new_group(members, use_local_synchronization=True)
    return find_hosts(
        own.get_group_store(),
        dist.get_rank(group),
        dist.get_world_size(group),
        _TIMEOUT_S,
        name="compression",
    )


def _group_of(ranks: list[int]) -> ProcessGroup | None:
    # Also for one rank: torch (2.13) names such a group by how many groups the process has, so that
    # all ranks must make equally many, or wait for each other under different names.
    group: ProcessGroup = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return group if len(ranks) > 1 else None
