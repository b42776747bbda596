"""Chooses the way of a group's calls, by where its ranks are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.collectives.host_group import HostGroup
from paceline.collectives.host_path import HostPath
from paceline.collectives.hosts import find_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOG = logging.getLogger(__name__)
Path = HostPath


def make_path(store: Any, rank: int, size: int, timeout_s: float) -> Path | None:
    """Return the way of a group's calls; None where gloo has all of them.

    Every rank of the group calls this; all get the same kind of path.

    Args:
        store: torch's store, where the ranks find each other.
        rank: this rank within the group.
        size: number of ranks.
        timeout_s: the longest wait for another rank.

    Raises:
        DeadlineExceeded: a rank did not come; the error names it.
    """
    own = dist.PrefixStore("paceline/", store)
    hosts = find_hosts(own, rank, size, timeout_s)
    if len(hosts) == 1:
        return HostPath(HostGroup.form(own, rank, size, timeout_s))
    if rank == 0:
        _say_gloo(hosts)
    return None


def _say_gloo(hosts: Sequence[Sequence[int]]) -> None:
    _LOG.warning(
        "collectives of a group of %d ranks pass to gloo: the ranks share no memory (%s)",
        sum(map(len, hosts)),
        "; ".join(f"ranks {', '.join(map(str, host))}" for host in hosts),
    )
