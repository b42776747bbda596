"""Reduce and broadcast along a tree: binomial, chain, and S-Caffe's combinations of both.

A tree is a list of edges; its `height` says in which step the first chunk goes up. Chunk c goes up
c steps later, so that one function, `pipeline`, makes a schedule of every tree::

    chain of 4                  binomial, 8 ranks              CB-4: chains of 4, binomial on top
    3 -> 2 -> 1 -> 0            1->0  3->2  5->4  7->6         3 -> 2 -> 1 -> 0
    height 0, 1, 2              2->0  6->4                     7 -> 6 -> 5 -> 4    4 -> 0
                                4->0                           heights 0, 1, 2;    height 3

A broadcast is the reversed reduce. With a = latency, b = seconds per byte, C chunks of an n-byte
message, and every rank on a link of its own:

    binomial          ceil(log2 p) (a + n b)               few, full messages: small sizes
    chain             (p - 2 + C) (a + n b / C)            tends to n b: large sizes, few ranks
    chain-binomial k  (k - 2 + ceil(log2(p/k)) + C) steps  shorter than the chain; the root receives
                                                           from log2(p/k) heads in one step
    chain-chain k     (k - 2 + p/k - 1 + C) steps          the chain's bandwidth at fewer steps

Source: Awan, Hamidouche, Hashmi and Panda, S-Caffe: co-designing MPI runtimes and Caffe for
scalable deep learning on modern GPU clusters, PPoPP 2017 (hierarchical reduce). There the upper
level begins when the lower one has ended; here each chunk goes on up as soon as it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.core.errors import UsageError
from paceline.schedules.compose import reverse
from paceline.schedules.groups import check_groups
from paceline.schedules.schedule import Schedule, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

TreeOperation = Literal["reduce", "broadcast"]


class Edge(NamedTuple):
    """A rank of a tree that is not its root.

    Attributes:
        child: the rank.
        parent: where it sends what it has reduced.
        height: step in which its first chunk is ready: more than that of each of its children.
    """

    child: int
    parent: int
    height: int


def binomial(operation: TreeOperation, ranks: int, *, root: int = 0, chunks: int = 1) -> Schedule:
    """Return the binomial tree: log2(p) steps in which half of the ranks left over send.

    Cost: p - 1 messages of n bytes in all, ceil(log2 p) of them at the root.
    """
    edges = binomial_tree(_rotated(ranks, root))
    return _tree_schedule(operation, "binomial", ranks, root, edges, chunks)


def chain(operation: TreeOperation, ranks: int, *, root: int = 0, chunks: int) -> Schedule:
    """Return the pipelined chain: each rank passes chunk by chunk on to the next one.

    Cost: `chunks` messages and n bytes per rank. Source: as above, and Awan et al., Optimized
    broadcast for deep learning workloads on dense-GPU InfiniBand clusters, arXiv 1707.09414.
    """
    edges = chain_tree(_rotated(ranks, root))
    return _tree_schedule(operation, "chain", ranks, root, edges, chunks)


def chain_binomial(
    operation: TreeOperation, groups: Sequence[Sequence[int]], *, root: int = 0, chunks: int
) -> Schedule:
    """Return S-Caffe's CB-k: chains inside groups, a binomial tree between the groups' heads.

    Args:
        operation: reduce or broadcast.
        groups: chains of ranks: hosts, or `groups_of(ranks, k)`. The head is a chain's first rank,
            in the root's group the root.
        root: any rank.
        chunks: of the pipeline through both levels.

    Cost: `chunks` messages and n bytes per rank that is no head; up to log2(groups) n at a head.
    """
    ordered = _rooted(groups, root)
    heads = binomial_tree([group[0] for group in ordered])
    return _two_levels(operation, "chain-binomial", ordered, heads, chunks)


def chain_chain(
    operation: TreeOperation, groups: Sequence[Sequence[int]], *, root: int = 0, chunks: int
) -> Schedule:
    """Return S-Caffe's CC: chains inside groups, a chain of the groups' heads.

    Arguments as in `chain_binomial`. Cost: `chunks` messages and n bytes per rank.
    """
    ordered = _rooted(groups, root)
    heads = chain_tree([group[0] for group in ordered])
    return _two_levels(operation, "chain-chain", ordered, heads, chunks)


def chain_tree(members: Sequence[int], height: int = 0) -> list[Edge]:
    """Return the chain that ends in the first member; its farthest rank sends at `height`."""
    last = len(members) - 1
    return [Edge(members[i], members[i - 1], height + last - i) for i in range(1, last + 1)]


def binomial_tree(members: Sequence[int], height: int = 0) -> list[Edge]:
    """Return the binomial tree to the first member; its leaves send from `height` on.

    Member i, whose lowest set bit is bit s, sends at height s to the member without that bit.
    """
    return [
        Edge(members[i], members[i & (i - 1)], height + (i & -i).bit_length() - 1)
        for i in range(1, len(members))
    ]


def pipeline(edges: Sequence[Edge], bounds: Sequence[int]) -> list[Transfer]:
    """Return the reduction along the tree, block after block of the message."""
    transfers = [
        Transfer(edge.height + i, edge.child, edge.parent, bounds[i], bounds[i + 1], True)
        for i in range(len(bounds) - 1)
        for edge in edges
    ]
    return sorted(transfers, key=lambda transfer: transfer.step)


def _rotated(ranks: int, root: int) -> list[int]:
    return [(root + i) % ranks for i in range(ranks)]


def _rooted(groups: Sequence[Sequence[int]], root: int) -> list[list[int]]:
    """Return the groups with the root's first, and the root first in it."""
    ranks = check_groups(groups)
    if not 0 <= root < ranks:
        raise UsageError(
            f"root {root} is not among {ranks} ranks", fix=f"Give a root from 0 to {ranks - 1}"
        )
    first = next(group for group in groups if root in group)
    others = [list(group) for group in groups if root not in group]
    return [[root, *(rank for rank in first if rank != root)], *others]


def _two_levels(
    operation: TreeOperation,
    name: str,
    groups: Sequence[Sequence[int]],
    heads: Sequence[Edge],
    chunks: int,
) -> Schedule:
    """Return the schedule of chains in `groups` whose heads form the tree `heads`."""
    longest = max(len(group) for group in groups)
    # A shorter chain begins later, so that all heads are ready in the same step.
    edges = [edge for group in groups for edge in chain_tree(group, height=longest - len(group))]
    edges += [edge._replace(height=edge.height + longest - 1) for edge in heads]
    ranks = sum(len(group) for group in groups)
    algorithm = f"{name}-{longest}"
    return _tree_schedule(operation, algorithm, ranks, groups[0][0], edges, chunks)


def _tree_schedule(
    operation: TreeOperation,
    algorithm: str,
    ranks: int,
    root: int,
    edges: Sequence[Edge],
    chunks: int,
) -> Schedule:
    part = pipeline(edges, range(chunks + 1))
    return Schedule(
        operation=operation,
        algorithm=algorithm,
        ranks=ranks,
        chunks=chunks,
        root=root,
        transfers=tuple(part if operation == "reduce" else reverse(part)),
    )
