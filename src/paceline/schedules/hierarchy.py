"""All-reduce for ranks that share hosts: as few bytes as possible over the slow links.

For H hosts with L ranks each, n bytes, and in each direction of a host's link to the network:

    flat ring, in the order of hosts    2 n (H L - 1) / (H L)
    two-level sharded                   2 n (H - 1) / H             the least that is possible
    two-level leader                    2 n (H - 1) / H             by one rank per host

With sharding all ranks of a host send at once, which a single rank can seldom do as fast. A leader
needs fewer messages, and hosts may have different numbers of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.core.errors import UsageError
from paceline.schedules.compose import reverse, split, then, together
from paceline.schedules.groups import check_groups
from paceline.schedules.halving import core_size, halving_all_reduce
from paceline.schedules.ring import ring_all_reduce, ring_reduce_scatter
from paceline.schedules.schedule import Schedule, Transfer
from paceline.schedules.trees import binomial_tree, pipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

Across = Literal["ring", "halving"]


def two_level_sharded(hosts: Sequence[Sequence[int]], *, across: Across = "ring") -> Schedule:
    """Return reduce-scatter in each host, all-reduce of the shards across, all-gather in each host.

    Args:
        hosts: the ranks of each host; equally many on each.
        across: how ranks with the same place in their hosts all-reduce their shard.

    Raises:
        UsageError: the hosts have different numbers of ranks.

    Cost: per rank 2 (L - 1)/L n bytes inside the host and 2 (H - 1)/(H L) n across hosts.
    Source: Ueno and Yokota, Exhaustive study of hierarchical AllReduce patterns for large messages
    between GPUs, CCGRID 2019; the shards are those of Rabenseifner's algorithm.
    """
    ranks = check_groups(hosts)
    _check_equal(hosts, "two-level sharded")
    chunks = len(hosts[0]) * _blocks(len(hosts), across)
    return Schedule(
        operation="all_reduce",
        algorithm=f"two-level-sharded-{across}",
        ranks=ranks,
        chunks=chunks,
        transfers=tuple(_sharded(hosts, 0, chunks, across)),
    )


def two_level_leader(hosts: Sequence[Sequence[int]], *, across: Across = "ring") -> Schedule:
    """Return a reduce to each host's first rank, all-reduce of these leaders, and a broadcast back.

    Args:
        hosts: the ranks of each host, as many as there are.
        across: how the leaders all-reduce.

    Cost: ceil(log2 L) messages of n bytes inside each host before and after; 2 (H - 1)/H n bytes
    per leader. Source: Goyal et al., Accurate, large minibatch SGD, arXiv 1706.02677, section 4.
    """
    ranks = check_groups(hosts)
    chunks = _blocks(len(hosts), across)
    gather = together(pipeline(binomial_tree(host), [0, chunks]) for host in hosts)
    leaders = _all_reduce([host[0] for host in hosts], 0, chunks, across)
    return Schedule(
        operation="all_reduce",
        algorithm=f"two-level-leader-{across}",
        ranks=ranks,
        chunks=chunks,
        transfers=tuple(then(gather, leaders, reverse(gather))),
    )


def torus(rows: Sequence[Sequence[int]]) -> Schedule:
    """Return the all-reduce on a 2-D torus, of which both dimensions are busy all the time.

    Half of the message is reduce-scattered along the rows, all-reduced along the columns and
    all-gathered along the rows; the other half the other way round at the same time. With one half
    alone this is `two_level_sharded`, whose hosts are the rows.

    Args:
        rows: the ranks of each row, for example those of a host; equally many in each.

    Raises:
        UsageError: the rows have different lengths.

    Cost: 2 (X - 1) + 2 (Y - 1) steps for Y rows of X ranks. Per rank n (X - 1)(Y + 1)/(X Y) bytes
    along the rows and n (X + 1)(Y - 1)/(X Y) along the columns.
    Source: Jain and Sabharwal, Optimal bucket algorithms for large MPI collectives on torus
    interconnects, ICS 2010; Mikami et al., arXiv 1811.05233 (one half).
    """
    check_groups(rows)
    _check_equal(rows, "the torus")
    columns = list(zip(*rows, strict=True))
    ranks = len(rows) * len(columns)
    halves = (_sharded(rows, 0, ranks, "ring"), _sharded(columns, ranks, 2 * ranks, "ring"))
    return Schedule(
        operation="all_reduce",
        algorithm=f"torus-{len(rows)}x{len(columns)}",
        ranks=ranks,
        chunks=2 * ranks,
        transfers=tuple(together(halves)),
    )


def _sharded(
    hosts: Sequence[Sequence[int]], begin: int, end: int, across: Across
) -> list[Transfer]:
    """Return the two-level sharded all-reduce of the chunks from `begin` to `end`."""
    size = len(hosts[0])
    shards = split(begin, end, size)
    inside = together(ring_reduce_scatter(host, shards) for host in hosts)
    shard_parts = [
        _all_reduce([host[i] for host in hosts], shards[i], shards[i + 1], across)
        for i in range(size)
    ]
    return then(inside, together(shard_parts), reverse(inside))


def _blocks(members: int, across: Across) -> int:
    """Return into how many blocks the all-reduce divides its chunks."""
    return members if across == "ring" else core_size(members)


def _all_reduce(members: Sequence[int], begin: int, end: int, across: Across) -> list[Transfer]:
    bounds = split(begin, end, _blocks(len(members), across))
    make = ring_all_reduce if across == "ring" else halving_all_reduce
    return make(members, bounds)


def _check_equal(hosts: Sequence[Sequence[int]], name: str) -> None:
    sizes = sorted({len(host) for host in hosts})
    if len(sizes) > 1:
        raise UsageError(
            f"{name} needs equally many ranks in each group, got {sizes[0]} to {sizes[-1]}",
            fix="Use two_level_leader, which takes hosts of any sizes, or ring",
        )
