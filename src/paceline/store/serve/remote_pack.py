"""Reads a pack that lies on other nodes as `Pack` reads one that lies here.

The index is a local copy; the bytes come from the first of these that has them right:

    a node on this host      its files are mapped, nothing is sent
    the nodes that hold it   in the order of placement, several nodes at a time
    the source               the pack's folder on the shared file system, if it is known

Every sample is compared with its checksum here, whatever a node says. What a node sends damaged, or
does not send, is read again elsewhere; only when nothing has it right, an error says so and names
the file and what each node did.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.clock import SystemClock
from paceline.core.config import environment
from paceline.core.errors import CorruptPack, PacelineError, RankLost, StorageError, UsageError
from paceline.native import ExtentPlan, PackReader, acquire_buffer
from paceline.store.read.pack import Pack, open_packed, read_options
from paceline.store.serve.card import NodeAddress, host_identity
from paceline.store.serve.links import DAMAGED, GOOD, NOT_HELD, NodeLink, TcpNodeLink
from paceline.store.serve.membership import Heard, Membership, Silent
from paceline.store.serve.run_data import find_served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from paceline.core.clock import Clock
    from paceline.store.serve.card import NodeCard

_LOG = logging.getLogger(__name__)
_WAIT_S = 30.0
_ASK_S = 2.0  # for a node's card: one that is gone must not hold up what replicas can serve
_RETRY_S = 5.0  # before a silent node is asked again


class RemotePack(Pack):
    """A data set that nodes serve; see `open_remote`. Samples are numbered as in the pack."""

    def __init__(
        self,
        index: str | os.PathLike[str],
        links: Sequence[NodeLink],
        *,
        replicas: int = 1,
        source: str | os.PathLike[str] | None = None,
        wait_s: float = _WAIT_S,
        maps_files: bool = True,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(index, read_options(verify="always", index_only=True))
        self._links = {link.name: link for link in links}
        self._source_path = None if source is None else Path(source)
        self._wait_s = wait_s
        self._maps_files = maps_files
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()  # of what follows
        self._near: dict[str, PackReader] = {}
        self._asked_s: dict[str, float] = {}
        self._has_missed = False  # some shard was not where it was sought: nodes may have more now
        self._source: Pack | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()  # that the threads are of
        self._members = Membership(
            self_name="",
            peers=list(self._links),
            shard_count=self.shard_count,
            replicas=replicas,
            grace_s=0.0,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError(
            "a pack on other nodes cannot be sent to another process",
            where=str(self.path),
            fix="Open it there (open_remote), or use worker threads: worker_kind='thread'",
        )

    @property
    def is_here(self) -> bool:
        """See `Pack.is_here`: at `path` lies only the index, as far as this pack knows."""
        return False

    def read(self, sample: int) -> bytes:
        """See `Pack.read`; a RankLost says that no node and no source has the sample."""
        self._check_range(sample, sample, self._open())
        return self.read_batch([sample])[0].tobytes()

    def read_batch(
        self, samples: ArrayLike, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """See `Pack.read_batch`; a RankLost says that no node and no source has a sample."""
        reader = self._open()
        ids = self._ids(samples, reader)
        self._ask_nodes()
        for node, near in self._whole_near_readers():
            try:
                if out is None:
                    return near.read_batch(ids)
                offsets = near.read_batch_into(ids, out)
            except (CorruptPack, StorageError) as problem:
                self._drop_near(node, problem)
            else:
                return out[: offsets[-1]], offsets
        plan = ExtentPlan(reader, ids)
        if out is None:
            out = acquire_buffer(plan.size)
        elif out.nbytes < plan.size:
            raise UsageError(
                "the buffer cannot hold the samples",
                where=str(self.path),
                why=f"it has {out.nbytes} bytes, the samples {plan.size}",
                fix="Give a larger one, or none",
            )
        _Batch(self, plan, ids, out).read()
        return out[: plan.size], plan.offsets

    def views(self, samples: ArrayLike) -> list[memoryview]:
        """See `Pack.views`: without a copy if a node on this host holds all shards."""
        self._ask_nodes()
        for node, near in self._whole_near_readers():
            try:
                return near.views(self._ids(samples, near))
            except (CorruptPack, StorageError) as problem:
                self._drop_near(node, problem)
        buffer, offsets = self.read_batch(samples)
        view = memoryview(buffer.data).toreadonly()
        return [view[begin:end] for begin, end in itertools.pairwise(offsets)]

    def prefetch(self, samples: ArrayLike) -> None:
        """Do nothing: batches are fetched as a whole, many requests at a time."""

    @property
    def read_times_s(self) -> tuple[float, float]:
        """See `Pack.read_times_s`; of remote reads nothing is known."""
        return 0.0, 0.0

    def close(self) -> None:
        """Close the index and the connections."""
        super().close()
        for link in self._links.values():
            link.close()
        if self._threads is not None:
            self._threads.shutdown()

    def _ask_nodes(self) -> None:
        """Ask the nodes that were not asked yet, or were silent for a while, what they hold."""
        is_complete = len(self._asked_s) == len(self._links) and not self._has_missed
        if is_complete and len(self._members.live()) == len(self._links):
            return
        now_s = self._clock.now_s()
        with self._lock:
            names = [
                name
                for name in self._links
                if now_s - self._asked_s.get(name, -math.inf) >= _RETRY_S
                and (self._has_missed or name not in self._asked_s or self._is_lost(name))
            ]
            self._has_missed = self._has_missed and not names
            self._asked_s.update(dict.fromkeys(names, now_s))
        for name in names:
            try:
                card = self._links[name].card(min(_ASK_S, self._wait_s))
            except RankLost as problem:
                self._note_lost(name, problem)
                continue
            with self._lock:
                self._members.handle(Heard(node=name, held=frozenset(card.held)), now_s)
                self._map_near(name, card)

    def _is_lost(self, name: str) -> bool:
        return name not in self._members.live()

    def _note_lost(self, name: str, problem: RankLost) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            if not self._is_lost(name):
                _LOG.warning("%s; reading from replicas or the source instead", problem)
            self._asked_s[name] = now_s
            self._members.handle(Silent(node=name), now_s)

    def _map_near(self, name: str, card: NodeCard) -> None:
        """Map the files of a node on this host, if they are there and of this pack."""
        if not self._maps_files or not card.folder or card.host != host_identity():
            return
        try:
            options = read_options()
            near = PackReader(os.fsencode(card.folder), **options, lazy=True)
        except (PacelineError, OSError):  # another container's folder, for example
            return
        if near.head == self._open().head:
            self._near[name] = near

    def _whole_near_readers(self) -> list[tuple[str, PackReader]]:
        """Return the nodes of which all shards are mapped here, and their readers."""
        return [(node, near) for node, near in self._near.items() if self._members.holds_all(node)]

    def _drop_near(self, node: str, problem: PacelineError) -> None:
        _LOG.warning("%s; reading from other nodes instead", problem)
        with self._lock:
            self._near.pop(node, None)

    def _holders(self, shard: int) -> list[str]:
        with self._lock:
            return self._members.holders(shard)

    def _forget(self, name: str, shard: int) -> None:
        with self._lock:
            self._has_missed = True
            self._members.forget(name, shard)

    def _source_pack(self) -> Pack | None:
        with self._lock:
            if self._source is None and self._source_path is not None:
                opened = open_packed(self._source_path)
                if opened.identity != self.identity:
                    raise UsageError(
                        "the source is another pack",
                        where=str(self._source_path),
                        why=f"its identity is {opened.identity}, not {self.identity}",
                        fix="Give the pack that the nodes serve as their source",
                    )
                self._source = opened
            return self._source

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None or self._process != os.getpid():  # a fork has no threads
                self._threads = ThreadPoolExecutor(8, "paceline-fetch")
                self._process = os.getpid()
            return self._threads


class _Batch:
    """One batch on its way: which extents are still to be read, and who failed with which shard."""

    def __init__(
        self, pack: RemotePack, plan: ExtentPlan, ids: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> None:
        self.pack = pack
        self.plan = plan
        self.ids = ids
        self.out = out
        self.shards = plan.shards
        self.left = np.arange(len(self.shards))
        self.problems: dict[int, dict[str, str]] = {}  # by shard and node

    def read(self) -> None:
        """Fill the buffer.

        Raises:
            RankLost: no node that is there has a sample right, and there is no source.
            CorruptPack: the source has it damaged, too; or all nodes have.
        """
        while self.left.size:
            groups, hopeless = self._groups()
            if hopeless.size:
                self._read_source(hopeless)
            if not groups:
                return
            if len(groups) == 1:
                results = [self._fetch(*groups[0])]
            else:
                results = list(self.pack._pool().map(lambda group: self._fetch(*group), groups))  # noqa: SLF001
            self.left = np.concatenate(results)

    def _groups(self) -> tuple[list[tuple[str, NDArray[np.int64]]], NDArray[np.int64]]:
        """Return the extents to ask each node for, and those that no node is left for."""
        nodes: dict[str, list[NDArray[np.int64]]] = {}
        hopeless = []
        of_shard = self.shards[self.left]
        for shard in np.unique(of_shard).tolist():
            items = self.left[of_shard == shard]
            failed = self.problems.get(shard, {})
            holders = (name for name in self.pack._holders(shard) if name not in failed)  # noqa: SLF001
            node = next(holders, None)
            if node is None:
                hopeless.append(items)
            else:
                nodes.setdefault(node, []).append(items)
        groups = [(node, np.concatenate(items)) for node, items in nodes.items()]
        return groups, np.concatenate(hopeless) if hopeless else np.empty(0, np.int64)

    def _fetch(self, node: str, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Fetch from one node; return what it did not have right."""
        pack = self.pack
        try:
            outcomes = pack._links[node].fetch(self.plan, items, self.out, pack._wait_s)[items]  # noqa: SLF001
        except RankLost as problem:
            pack._note_lost(node, problem)  # noqa: SLF001
            for shard in set(self.shards[items].tolist()):
                self.problems.setdefault(shard, {})[node] = problem.why or problem.what
            return items
        bad: NDArray[np.int64] = items[outcomes != GOOD]
        for item, outcome in zip(bad.tolist(), outcomes[outcomes != GOOD].tolist(), strict=True):
            shard = int(self.shards[item])
            why = "it does not hold the shard" if outcome == NOT_HELD else "its bytes are damaged"
            if outcome == NOT_HELD:
                pack._forget(node, shard)  # noqa: SLF001
            elif outcome == DAMAGED:
                _LOG.warning("%s sent damaged bytes of shard %d; reading elsewhere", node, shard)
            self.problems.setdefault(shard, {})[node] = why
        return bad

    def _read_source(self, items: NDArray[np.int64]) -> None:
        """Read samples that no node has right from the source."""
        self.pack._has_missed = True  # noqa: SLF001
        source = self.pack._source_pack()  # noqa: SLF001
        if source is None:
            raise self._nobody_has(int(items[0]))
        offsets = self.plan.offsets
        for number in np.unique(self.plan.numbers[items]).tolist():
            place = self.out[offsets[number] : offsets[number + 1]]
            source.read_batch(self.ids[number : number + 1], place)

    def _nobody_has(self, item: int) -> PacelineError:
        shard = int(self.shards[item])
        sample = int(self.ids[self.plan.numbers[item]])
        problems = self.problems.get(shard, {})
        damaged = problems and all("damaged" in why for why in problems.values())
        error_class = CorruptPack if damaged else RankLost
        name = self.pack.names[sample]
        said = "; ".join(f"{node}: {why}" for node, why in problems.items())
        return error_class(
            f"sample {sample} {name!a} cannot be read from any node",
            where=str(self.pack.index.shard_path(shard)),
            why=said or "no node that can be reached holds its shard",
            fix="Start the nodes again, or give the pack on the shared file system as source",
        )


def open_remote(
    index: str | os.PathLike[str],
    nodes: Sequence[str] | None = None,
    *,
    replicas: int = 1,
    source: str | os.PathLike[str] | None = None,
    token: str = "",
    wait_s: float = _WAIT_S,
    maps_files: bool = True,
) -> RemotePack:
    """Open a pack whose shards nodes serve (``paceline store serve``).

    Args:
        index: folder with the pack's index, ``index.pace``; no shards are needed.
        nodes: their addresses, ``HOST:PORT``: the same on all clients and nodes. None: those of
            this run, which was started with ``paceline run --data`` and this path; then replicas,
            source and token are the run's.
        replicas: copies of each shard, as the nodes were started with.
        source: the whole pack, to read what no node has.
        token: that the nodes were started with.
        wait_s: for what one read asks of one node.
        maps_files: read the files of nodes on this host instead of asking for bytes.

    Raises:
        NotFound: there is no index; or no nodes were given, and the run serves no such pack.
        UsageError: an address is none; a node refuses the token, or serves another pack.
    """
    if nodes is None:
        served = find_served(index, environment())
        index, nodes, source = served.local, served.nodes, served.place
        replicas, token = served.replicas, served.token
    with open_packed(index, index_only=True) as opened:
        identity = opened.identity
    links = [TcpNodeLink(NodeAddress.parse(node), identity, token) for node in nodes]
    return RemotePack(
        index, links, replicas=replicas, source=source, wait_s=wait_s, maps_files=maps_files
    )
