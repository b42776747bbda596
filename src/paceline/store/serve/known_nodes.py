"""What a client knows of the nodes that serve a pack: who is there, who holds what, how to read it.

The nodes are asked for their cards once; those that were silent, and all of them once a shard was
not where it was sought, are asked again every few seconds, beside the reads. A card also names
nodes that joined since. The files of a node on this host are mapped, whether it holds all shards or
a part of them; what is not in them is asked for over the node's link.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import CorruptPack, PacelineError, RankLost, StorageError
from paceline.native import PackReader
from paceline.store.read.pack import read_options
from paceline.store.serve.card import host_identity
from paceline.store.serve.link_rates import LinkRates
from paceline.store.serve.links import GOOD, MISSING
from paceline.store.serve.membership import Heard, Membership, Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from paceline.core.clock import Clock
    from paceline.native import ExtentPlan
    from paceline.store.serve.card import NodeCard
    from paceline.store.serve.links import Connector, NodeLink

_LOG = logging.getLogger(__name__)
_ASK_S = 2.0  # for a node's card: one that is gone must not hold up what replicas can serve
_RETRY_S = 5.0  # before a silent node is asked again
_TELL_AGAIN_S = 60.0  # a node that sends damaged bytes
_AT_ONCE = 8  # nodes that are asked, or fetched from, at the same time


@dataclass(kw_only=True, slots=True)
class TierBytes:
    """Bytes of samples that came from each tier."""

    mapped: int = 0  # files of a node on this host
    cached: int = 0  # this process's own cache on local storage
    nodes: int = 0
    source: int = 0


class KnownNodes:
    """The nodes, as one client sees them. May be used from many threads at once.

    A forked child may use them as well, and calls `refresh` first, as each read does.

    Args:
        links: to the nodes.
        head: of the pack's index, as `PackReader.head`: files of a node are mapped if theirs is it.
        shard_count: of the pack.
        replicas: copies of each shard, as the nodes were started with.
        wait_s: for what one read asks of one node.
        maps_files: whether to map the files of nodes on this host.
        connect: makes the link to a node that another node names; None: such nodes are left out.
        clock: for retries.
    """

    def __init__(
        self,
        links: Sequence[NodeLink],
        *,
        head: bytes,
        shard_count: int,
        replicas: int,
        wait_s: float,
        maps_files: bool,
        connect: Connector | None,
        clock: Clock,
    ) -> None:
        self.tiers = TierBytes()
        self._head = head
        self._wait_s = wait_s
        self._maps_files = maps_files
        self._connect = connect
        self._clock = clock
        self._rates = LinkRates(clock)
        self._lock = threading.Lock()  # of what follows
        self._links = {link.name: link for link in links}
        self._near: dict[str, PackReader] = {}
        self._asked_s: dict[str, float] = {}
        self._sought_s: dict[int, float] = {}  # by shard: when its owners were last asked for it
        self._why_lost: dict[str, str] = {}
        self._damaged_s: dict[tuple[str, int], float] = {}  # last report of a shard to a node
        self._has_missed = False  # some shard was not where it was sought: nodes may have more now
        self._members = Membership(
            self_name="",
            peers=list(self._links),
            shard_count=shard_count,
            replicas=replicas,
            grace_s=0.0,
        )
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()  # that the threads are of

    def names(self) -> list[str]:
        """Return the names of all nodes, also of those that cannot be reached."""
        with self._lock:
            return list(self._links)

    def why_lost(self) -> dict[str, str]:
        """Return why each node that is lost cannot be reached."""
        with self._lock:
            lost = set(self._links) - set(self._members.live())
            return {name: why for name, why in self._why_lost.items() if name in lost}

    def refresh(self, wait_s: float = _ASK_S) -> None:
        """Ask for cards where it is due; wait, so long, only for nodes that were never asked."""
        if self._process != os.getpid():  # forked: without the threads, and a lock may be taken
            self._process, self._lock, self._threads = os.getpid(), threading.Lock(), None
            self._rates = LinkRates(self._clock)
        while self._ask_due(wait_s):
            pass  # some node may have named another one

    def holders(self, shard: int) -> list[str]:
        """Return the nodes to read a shard from: first mapped ones, last slow ones."""
        with self._lock:
            holders = self._members.holders(shard)
            near = [name for name in holders if name in self._near]
        return [*near, *self._rates.order([name for name in holders if name not in near])]

    def fetch(
        self, node: str, plan: ExtentPlan, items: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Bring extents to their places in `out`, from a node's mapped files or over its link.

        Arguments, result and errors are those of `NodeLink.fetch`.
        """
        outcomes = self._read_mapped(node, plan, items, out)
        left = items if outcomes is None else items[outcomes[items] == MISSING]
        if left.size:
            begin_s = self._clock.now_s()
            sent = self._links[node].fetch(plan, left, out, self._wait_s)
            size = int(plan.stored_lengths[left[sent[left] == GOOD]].sum())
            self._rates.note(node, size, self._clock.now_s() - begin_s)
            self.count(nodes=size)
            outcomes = sent if outcomes is None else np.maximum(outcomes, sent)
        assert outcomes is not None
        return outcomes

    def fetch_range(self, node: str, shard: int, offset: int, out: NDArray[np.uint8]) -> int:
        """Fill `out` with bytes of a shard's file; see `NodeLink.fetch_range`."""
        return self._links[node].fetch_range(shard, offset, out, self._wait_s)

    def fetch_all(
        self,
        fetch: Callable[[str, NDArray[np.int64]], NDArray[np.int64]],
        groups: Sequence[tuple[str, NDArray[np.int64]]],
    ) -> list[NDArray[np.int64]]:
        """Return what `fetch` returns of each node and its extents, all nodes at the same time."""
        if len(groups) == 1:
            return [fetch(*groups[0])]
        return list(self._pool().map(lambda group: fetch(*group), groups))

    def seek(self, shards: Iterable[int], *, at_once: bool = False) -> dict[int, str]:
        """Return the nodes that turn out to hold these shards, of which no holder was known.

        Lost nodes are asked again: they may have been started since. So are the owners: a node may
        have joined and taken the shard over, and they name it. Owners are also asked for a byte of
        the shard, so that those that do not hold it yet copy it before others.

        Args:
            shards: that no node is known to hold.
            at_once: ask though it was done a moment ago, and wait for answers as long as for a
                read: there is nothing else to read from.
        """
        now_s = self._clock.now_s()
        with self._lock:
            due = [
                shard
                for shard in shards
                if at_once or now_s - self._sought_s.get(shard, -math.inf) >= _RETRY_S
            ]
            self._sought_s.update(dict.fromkeys(due, now_s))
            lost = {name for name in self._links if self._is_lost(name)} if due else set()
            owners = {name for shard in due for name in self._members.owners(shard)}
        wait_s = self._wait_s if at_once else _ASK_S
        ask = functools.partial(self._ask, wait_s=wait_s)
        for future in self._submit(ask, sorted(lost | owners)):
            future.result()
        self.refresh(wait_s)  # asks the nodes that these have named
        found = {}
        for shard in due:
            node = next(iter(self.holders(shard)), None) or self._ask_owners(shard)
            if node is not None:
                found[shard] = node
        return found

    def count(self, *, mapped: int = 0, cached: int = 0, nodes: int = 0, source: int = 0) -> None:
        """Count bytes of samples by the tier that they came from."""
        with self._lock:
            self.tiers.mapped += mapped
            self.tiers.cached += cached
            self.tiers.nodes += nodes
            self.tiers.source += source

    def note_lost(self, name: str, problem: RankLost) -> None:
        """Take note that a node did not answer."""
        now_s = self._clock.now_s()
        with self._lock:
            if not self._is_lost(name):
                _LOG.warning("%s; reading from replicas or the source instead", problem)
            self._asked_s[name] = now_s
            self._why_lost[name] = problem.why or problem.what
            self._members.note(Silent(node=name), now_s)

    def note_missing(self, name: str, shard: int) -> None:
        """Take note that a node does not hold a shard."""
        with self._lock:
            self._has_missed = True
            self._members.forget(name, shard)

    def note_damaged(self, name: str, shard: int) -> None:
        """Tell a node that it sent damaged bytes of a shard, beside the reads; once in a while."""
        now_s = self._clock.now_s()
        with self._lock:
            if now_s - self._damaged_s.get((name, shard), -math.inf) < _TELL_AGAIN_S:
                return
            self._damaged_s[name, shard] = now_s
        _LOG.warning("%s sent damaged bytes of shard %d; reading elsewhere", name, shard)

        def tell() -> None:
            with contextlib.suppress(PacelineError):  # what it says then is no reader's concern
                self._links[name].card(_ASK_S, damaged=shard)

        self._pool().submit(tell)

    def note_missed(self) -> None:
        """Take note that no node had something: they may have more by now."""
        self._has_missed = True

    def whole_readers(self) -> list[tuple[str, PackReader]]:
        """Return the nodes of which all shards are mapped here, and their readers."""
        with self._lock:
            near = self._near.items()
            return [(name, reader) for name, reader in near if self._members.holds_all(name)]

    def is_mapped(self, shard: int) -> bool:
        """Return whether a node on this host holds a shard."""
        with self._lock:
            return any(name in self._near for name in self._members.holders(shard))

    def drop_mapped(self, node: str, problem: PacelineError) -> None:
        """Read from a node over its link from now on: its files are not what they should be."""
        _LOG.warning("%s; asking nodes instead", problem)
        with self._lock:
            self._near.pop(node, None)

    def close(self) -> None:
        """Close all connections."""
        if self._threads is not None and self._process == os.getpid():
            self._threads.shutdown()
        for link in self._links.values():
            link.close()

    def _read_mapped(
        self, node: str, plan: ExtentPlan, items: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> NDArray[np.uint8] | None:
        reader = self._near.get(node)
        if reader is None:
            return None
        try:
            outcomes = plan.read_mapped(reader, items, out)
        except (CorruptPack, StorageError) as problem:
            self.drop_mapped(node, problem)
            return None
        self.count(mapped=int(plan.stored_lengths[outcomes == GOOD].sum()))
        return outcomes

    def _ask_due(self, wait_s: float) -> bool:
        """Ask the nodes that it is due to ask; return whether there were any that are new."""
        with self._lock:
            is_complete = len(self._asked_s) >= len(self._links) and not self._has_missed
            if is_complete and len(self._members.live()) == len(self._links):
                return False
            now_s = self._clock.now_s()
            due = [
                name
                for name in self._links
                if now_s - self._asked_s.get(name, -math.inf) >= _RETRY_S
                and (self._has_missed or name not in self._asked_s or self._is_lost(name))
            ]
            new = [name for name in due if name not in self._asked_s]
            self._has_missed = self._has_missed and not due
            self._asked_s.update(dict.fromkeys(due, now_s))
        ask = functools.partial(self._ask, wait_s=wait_s)
        asked = dict(zip(due, self._submit(ask, due), strict=True))
        for name in new:
            asked[name].result()
        return bool(new)

    def _ask(self, name: str, wait_s: float = _ASK_S) -> None:
        """Ask a node what it holds."""
        try:
            card = self._links[name].card(min(wait_s, self._wait_s))
        except RankLost as problem:
            self.note_lost(name, problem)
            return
        now_s = self._clock.now_s()
        with self._lock:
            self._members.note(Heard(node=name, held=frozenset(card.held)), now_s)
            self._asked_s[name] = now_s
            self._map_files(name, card)
            self._meet(card.peers)

    def _ask_owners(self, shard: int) -> str | None:
        """Ask the owners of a shard for a byte of it; return one that has it."""
        with self._lock:
            names = [name for name in self._members.owners(shard) if not self._is_lost(name)]
        byte = np.empty(1, np.uint8)
        for name in names:
            try:
                is_held = self._links[name].fetch_range(shard, 0, byte, self._wait_s) == GOOD
            except RankLost as problem:
                self.note_lost(name, problem)
                continue
            if is_held:
                with self._lock:
                    self._members.note_held(name, shard)
                return name
        return None

    def _meet(self, peers: Collection[str]) -> None:
        """Take nodes that another one names as nodes to read from."""
        for name in peers:
            if self._connect is not None and name not in self._links:
                self._links[name] = self._connect(name)
                self._members.add(name)

    def _map_files(self, name: str, card: NodeCard) -> None:
        """Map the files of a node on this host, if they are there and of this pack."""
        if not self._maps_files or not card.folder or card.host != host_identity():
            return
        if name in self._near:
            return
        try:
            reader = PackReader(os.fsencode(card.folder), **read_options(), lazy=True)
        except (PacelineError, OSError):  # another container's folder, for example
            return
        if reader.head == self._head:
            self._near[name] = reader

    def _is_lost(self, name: str) -> bool:
        return self._members.is_lost(name)

    def _submit(self, work: Callable[[str], None], names: Sequence[str]) -> list[Future[None]]:
        return [self._pool().submit(work, name) for name in names]

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_AT_ONCE, "paceline-fetch")
            return self._threads
