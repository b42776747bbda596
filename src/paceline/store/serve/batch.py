"""Reads one batch from nodes: from each what it holds, all at the same time, until nothing is left.

What a node did not send, or sent damaged, is asked of the next one that holds it, and in the end
read from the source. The error at the very end names what each node did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import CorruptPack, PacelineError, RankLost
from paceline.store.serve.links import DAMAGED, GOOD, NOT_HELD

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from paceline.native import ExtentPlan
    from paceline.store.read.pack import Pack
    from paceline.store.serve.cached_shards import CachedShards
    from paceline.store.serve.known_nodes import KnownNodes

_IS_DAMAGED = "its bytes are damaged"
_NOT_THERE = "it does not hold the shard"


class RemoteBatch:
    """One batch on its way: which extents are still to be read, and who failed with which shard.

    Args:
        pack: with the index.
        plan: of the batch.
        ids: its samples.
        out: buffer of the batch.
    """

    def __init__(
        self, pack: Pack, plan: ExtentPlan, ids: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> None:
        self._pack = pack
        self._plan = plan
        self._ids = ids
        self._out = out
        self._shards = plan.shards
        self._left = np.arange(len(self._shards))
        self._problems: dict[int, dict[str, str]] = {}  # by shard and node
        self._sought: set[int] = set()  # shards for which nodes were asked again

    def read(
        self,
        nodes: KnownNodes,
        source: Callable[[], Pack] | None,
        cache: CachedShards | None = None,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fill the buffer.

        Args:
            nodes: that serve the shards.
            source: opens the whole pack; None: it is not known.
            cache: of shards on local storage.
            waits: waits a moment for nodes that are still copying, and returns True; False: the
                time for that is over.

        Raises:
            RankLost: no node that is there has a sample right, and there is no source.
            CorruptPack: the source has it damaged, too; or all nodes have.
        """
        if cache is not None:
            is_here = cache.fetch(self._plan, self._left, self._out) == GOOD
            nodes.count(cached=int(self._plan.stored_lengths[self._left[is_here]].sum()))
            self._left = self._left[~is_here]
        at_once = source is None  # else nodes are asked for a shard every few seconds only
        while self._left.size:
            groups, hopeless = self._groups(nodes)
            if hopeless.size:
                if self._seek(nodes, hopeless, at_once=at_once):
                    continue
                if waits():
                    self._sought.clear()
                    at_once = True
                    continue
                self._read_source(nodes, source, hopeless)
            if not groups:
                return
            fetched = nodes.fetch_all(lambda node, items: self._fetch(nodes, node, items), groups)
            self._left = np.concatenate(fetched)

    def _groups(
        self, nodes: KnownNodes
    ) -> tuple[list[tuple[str, NDArray[np.int64]]], NDArray[np.int64]]:
        """Return the extents to ask each node for, and those that no node is left for."""
        of_node: dict[str, list[NDArray[np.int64]]] = {}
        hopeless = []
        of_shard = self._shards[self._left]
        for shard in np.unique(of_shard).tolist():
            items = self._left[of_shard == shard]
            failed = self._problems.get(shard, {})
            node = next((name for name in nodes.holders(shard) if name not in failed), None)
            if node is None:
                hopeless.append(items)
            else:
                of_node.setdefault(node, []).append(items)
        groups = [(node, np.concatenate(items)) for node, items in of_node.items()]
        return groups, np.concatenate(hopeless) if hopeless else np.empty(0, np.int64)

    def _seek(self, nodes: KnownNodes, items: NDArray[np.int64], *, at_once: bool) -> bool:
        """Return whether some shard that no node was known to hold is held by one after all."""
        shards = set(np.unique(self._shards[items]).tolist()) - self._sought
        self._sought |= shards
        found = nodes.seek(sorted(shards), at_once=at_once)
        for shard, node in found.items():
            failed = self._problems.get(shard, {})
            if failed.get(node) != _IS_DAMAGED:
                failed.pop(node, None)
        return bool(found)

    def _fetch(self, nodes: KnownNodes, node: str, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Fetch from one node; return what it did not have right."""
        try:
            outcomes = nodes.fetch(node, self._plan, items, self._out)[items]
        except RankLost as problem:
            nodes.note_lost(node, problem)
            for shard in set(self._shards[items].tolist()):
                self._problems.setdefault(shard, {})[node] = problem.why or problem.what
            return items
        bad: NDArray[np.int64] = items[outcomes != GOOD]
        for item, outcome in zip(bad.tolist(), outcomes[outcomes != GOOD].tolist(), strict=True):
            shard = int(self._shards[item])
            if outcome == NOT_HELD:
                nodes.note_missing(node, shard)
            elif outcome == DAMAGED:
                nodes.note_damaged(node, shard)
            why = _NOT_THERE if outcome == NOT_HELD else _IS_DAMAGED
            self._problems.setdefault(shard, {})[node] = why
        return bad

    def _read_source(
        self, nodes: KnownNodes, source: Callable[[], Pack] | None, items: NDArray[np.int64]
    ) -> None:
        """Read samples that no node has right from the source."""
        nodes.note_missed()
        if source is None:
            raise self._nobody_has(nodes, int(items[0]))
        opened = source()
        offsets = self._plan.offsets
        for number in np.unique(self._plan.numbers[items]).tolist():
            place = self._out[offsets[number] : offsets[number + 1]]
            opened.read_batch(self._ids[number : number + 1], place)
            nodes.count(source=len(place))

    def _nobody_has(self, nodes: KnownNodes, item: int) -> PacelineError:
        shard = int(self._shards[item])
        sample = int(self._ids[self._plan.numbers[item]])
        problems = self._problems.get(shard, {})
        damaged = problems and all(why == _IS_DAMAGED for why in problems.values())
        error_class = CorruptPack if damaged else RankLost
        name = self._pack.names[sample]
        said = {**nodes.why_lost(), **problems}
        others = [node for node in nodes.names() if node not in said]
        return error_class(
            f"sample {sample} {name!a} cannot be read from any node",
            where=str(self._pack.index.shard_path(shard)),
            why="; ".join(
                [
                    *(f"{node}: {why}" for node, why in said.items()),
                    *(f"{node}: {_NOT_THERE}" for node in others),
                ]
            ),
            fix="Start the nodes again, or give the pack on the shared file system as source",
        )
