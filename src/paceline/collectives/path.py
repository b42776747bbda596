"""Chooses the way of a group's calls, by where its ranks are.

all ranks on one host                     HostPath        shared memory
hosts with as many ranks each, above 1    TwoLevelPath    shared memory, then gloo between hosts
anything else                             none            gloo
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.collectives.host_group import HostGroup
from paceline.collectives.host_path import HostPath
from paceline.collectives.hosts import find_hosts
from paceline.collectives.options import CollectivesConfig
from paceline.collectives.two_level import HostPlace, TwoLevelPath
from paceline.core.config import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOG = logging.getLogger(__name__)


def make_path(store: Any, rank: int, members: tuple[int, ...], timeout_s: float) -> Any:
    """Return the way of a group's calls, a HostPath or TwoLevelPath; None where gloo has all.

    Every rank of the group calls this; all get the same kind of path.

    Args:
        store: torch's store, where the ranks find each other.
        rank: this rank within the group.
        members: the global ranks of the group, in order of their rank in it.
        timeout_s: the longest wait for another rank.

    Raises:
        DeadlineExceeded: a rank did not come; the error names it.
        ConfigError: a setting of rank 0 is not valid.
    """
    own, size = dist.PrefixStore("paceline/", store), len(members)
    hosts = find_hosts(own, rank, size, timeout_s)
    if len(hosts) == 1:
        return HostPath(HostGroup.form(own, rank, size, timeout_s), members)
    config = _common_config(own, rank, timeout_s)
    lengths = {len(host) for host in hosts}
    if len(lengths) == 1 and (lengths != {1} or config.wire != "same"):
        return two_levels(own, hosts, rank, members, timeout_s, config)
    if rank == 0:
        _say_gloo(hosts)
    return None


def two_levels(
    store: Any,
    hosts: Sequence[Sequence[int]],
    rank: int,
    members: tuple[int, ...],
    timeout_s: float,
    config: CollectivesConfig,
) -> TwoLevelPath:
    """Return the path of a group on several hosts; every rank of the group calls this.

    Args:
        store: where the ranks find each other.
        hosts: the group ranks of each host, all of one length.
        rank: this rank within the group.
        members: the global ranks of the group, in order of their rank in it.
        timeout_s: the longest wait for another rank.
        config: sizes and data types on the wire.
    """
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    ranks = hosts[host]
    place = HostPlace(tuple(map(tuple, hosts)), host, ranks.index(rank))
    group = HostGroup.form(
        dist.PrefixStore(f"host {host}/", store), place.local_rank, len(ranks), timeout_s
    )
    cross = c10d.ProcessGroupGloo(
        dist.PrefixStore(f"index {place.local_rank}/", store),
        host,
        len(hosts),
        timedelta(seconds=timeout_s),
    )
    own_members = tuple(members[peer] for peer in ranks)
    return TwoLevelPath(place, group, own_members, cross, config)


def _common_config(store: Any, rank: int, timeout_s: float) -> CollectivesConfig:
    """Return rank 0's configuration, so that all ranks take the same way."""
    key = "configuration"
    if rank == 0:
        store.set(key, resolve(CollectivesConfig).config.to_text())
    store.wait([key], timedelta(seconds=timeout_s))
    return CollectivesConfig.from_text(store.get(key).decode(), where="rank 0's configuration")


def _say_gloo(hosts: Sequence[Sequence[int]]) -> None:
    _LOG.warning(
        "collectives of %d ranks pass to gloo: the ranks that share memory are not as many on each "
        "host (%s)",
        sum(map(len, hosts)),
        "; ".join(f"ranks {', '.join(map(str, host))}" for host in hosts),
    )
