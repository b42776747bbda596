"""Places shards on nodes: a pure function of the names of the nodes, so that no one has to ask.

Rendezvous hashing: each shard ranks all nodes by a hash of (node, shard) and takes the first
`replicas` of them that have room. Without a bound, only the copies of a node that leaves would
move; but by chance some node would get far more than its share (by about its root), and a data set
that fills the nodes' disks to 95 % would not fit. So a node takes at most `1 + slack` of its share,
which moves a few more copies.

Source: D. Thaler, C. Ravishankar, Using name-based mappings to increase hit rates, IEEE/ACM ToN 6
(1998); V. Mirrokni, M. Thorup, M. Zadimoghaddam, Consistent hashing with bounded loads, SODA 2018.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


_SLACK = 0.01  # of a share; a node that leaves then moves up to 1.5 % of the other copies
_SPARE = 16  # nodes that a shard looks at beyond those that it needs, before it looks at all
_KEYS_AT_ONCE = 1 << 21
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlacement:
    """Which nodes hold which shard.

    Attributes:
        nodes: names, sorted.
        owners: shape (shards, copies): for each shard indices into `nodes`, the first owner first.
        everywhere: shards that the other nodes hold as well.
    """

    nodes: tuple[str, ...]
    owners: NDArray[np.int32]
    everywhere: frozenset[int] = frozenset()

    def owners_of(self, shard: int) -> tuple[str, ...]:
        """Return the names of the nodes that hold a shard, the first owner first."""
        first = tuple(self.nodes[node] for node in self.owners[shard])
        if shard not in self.everywhere:
            return first
        return (*first, *(name for name in self.nodes if name not in first))

    def shards_of(self, node: str) -> NDArray[np.int64]:
        """Return the shards that a node holds, ascending; none of a node that is not placed on."""
        if node not in self.nodes:
            return np.empty(0, np.int64)
        is_here = (self.owners == self.nodes.index(node)).any(axis=1)
        is_here[list(self.everywhere)] = True
        return np.flatnonzero(is_here)


def place(
    nodes: Collection[str],
    shard_count: int,
    replicas: int,
    everywhere: frozenset[int] = frozenset(),
) -> NodePlacement:
    """Return where the shards of a pack lie.

    With fewer nodes than `replicas`, each node holds each shard.

    Args:
        nodes: names, in any order.
        shard_count: of the pack.
        replicas: copies of each shard.
        everywhere: shards that all nodes hold; the others are spread as if these were not there.

    Raises:
        UsageError: there is no node, or two of one name, or `replicas` is below 1.
    """
    names = tuple(sorted(nodes))
    if not names or len(set(names)) != len(names) or replicas < 1:
        raise UsageError(
            f"shards cannot be placed on {len(names)} nodes with {replicas} replicas",
            where=", ".join(names),
            why="a name is there twice" if len(set(names)) != len(names) else "",
            fix="Give at least one node, each with a name of its own, and at least one replica",
        )
    copies = min(replicas, len(names))
    seeds = _seeds(names)
    left = shard_count - len(everywhere)
    room = np.full(len(names), _most_shards(left, copies, len(names)))
    owners = np.empty((shard_count, copies), np.int32)
    for shard, order in _rankings(seeds, shard_count, copies + _SPARE):
        if shard in everywhere:
            owners[shard] = order[:copies]
            continue
        chosen = order[room[order] > 0][:copies]
        if chosen.size < copies:  # all that were looked at are full
            order = np.argsort(_keys(seeds, shard, shard + 1)[0], kind="stable")
            chosen = order[room[order] > 0][:copies]
        chosen = _with_roomy_nodes(chosen, room, left)
        owners[shard] = chosen
        room[chosen] -= 1
        left -= 1
    return NodePlacement(nodes=names, owners=owners, everywhere=everywhere)


def _with_roomy_nodes(
    chosen: NDArray[np.int64], room: NDArray[np.int64], left: int
) -> NDArray[np.int64]:
    """Return the nodes for a shard, others if the shards after it would not find room otherwise.

    A node can take each of the `left` shards once. So a node with room for all of them loses some
    of it with each shard that it does not take; when there is no more room in all than is needed,
    such nodes have to take this one.
    """
    is_roomy = room >= left
    if not is_roomy.any():
        return chosen
    spare = int(np.minimum(room, left).sum()) - len(chosen) * left
    waiting = np.setdiff1d(np.flatnonzero(is_roomy), chosen)
    replaceable = np.flatnonzero(~is_roomy[chosen])
    count = min(len(waiting) - spare, len(replaceable))
    if count <= 0:
        return chosen
    changed = chosen.copy()
    changed[replaceable[-count:]] = waiting[np.argsort(-room[waiting], kind="stable")][:count]
    return changed


def _most_shards(shard_count: int, copies: int, node_count: int) -> int:
    return math.ceil(shard_count * copies / node_count * (1 + _SLACK))


def _seeds(names: tuple[str, ...]) -> NDArray[np.uint64]:
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)


def _rankings(
    seeds: NDArray[np.uint64], shard_count: int, count: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each shard with the first `count` nodes, in the order in which the shard wants them.

    Of thousands of nodes a shard wants few: sorting all of them would take most of the time.
    """
    at_once = max(1, _KEYS_AT_ONCE // len(seeds))
    for begin in range(0, shard_count, at_once):
        keys = _keys(seeds, begin, min(begin + at_once, shard_count))
        if count >= len(seeds):
            best = np.argsort(keys, axis=1, kind="stable")
        else:
            best = np.argpartition(keys, count, axis=1)[:, :count]
            order = np.argsort(np.take_along_axis(keys, best, axis=1), axis=1, kind="stable")
            best = np.take_along_axis(best, order, axis=1)
        yield from enumerate(best, begin)


def _keys(seeds: NDArray[np.uint64], begin: int, end: int) -> NDArray[np.uint64]:
    """Return by what shards [begin, end) rank the nodes, shape (shards, nodes)."""
    with np.errstate(over="ignore"):
        shards = np.arange(begin + 1, end + 1, dtype=np.uint64)
        keys: NDArray[np.uint64] = seeds[None, :] + _STEP * shards[:, None]
        keys = (keys ^ (keys >> np.uint64(30))) * _MIX[0]
        keys = (keys ^ (keys >> np.uint64(27))) * _MIX[1]
        keys ^= keys >> np.uint64(31)
    return keys
