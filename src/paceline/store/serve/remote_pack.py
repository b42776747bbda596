"""Reads a pack that lies on other nodes as `Pack` reads one that lies here.

The index is a local copy; the bytes come from the first of these that has them right:

    the cache                shards of other nodes, copied ahead of the reads (cached_shards.py)
    a node on this host      its files are mapped, nothing is sent
    the nodes that hold it   in the order of placement, several nodes at a time
    the source               the pack's folder on the shared file system, if it is known

Every sample is compared with its checksum here, whatever a node says. What a node sends damaged, or
does not send, is read again elsewhere; only when nothing has it right, an error says so and names
the file and what each node did.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.clock import SystemClock
from paceline.core.config import environment
from paceline.core.errors import CorruptPack, RankLost, StorageError, UsageError
from paceline.native import ExtentPlan, acquire_buffer
from paceline.store.read.pack import Pack, open_packed, read_options
from paceline.store.serve.batch import RemoteBatch
from paceline.store.serve.cached_shards import CachedShards
from paceline.store.serve.known_nodes import KnownNodes, TierBytes
from paceline.store.serve.links import NOT_HELD, tcp_connector
from paceline.store.serve.run_data import find_served

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from paceline.core.clock import Clock
    from paceline.store.serve.links import Connector, NodeLink

_WAIT_S = 30.0
_POLL_S = 0.05  # between two questions whether a shard has been copied
_PIECE_BYTES = 8 << 20


class RemotePack(Pack):
    """A data set that nodes serve; see `open_remote`. Samples are numbered as in the pack.

    Args:
        index: folder with the pack's index.
        links: to the nodes.
        replicas: copies of each shard, as the nodes were started with.
        source: the whole pack.
        wait_s: for what one read asks of one node.
        stage_wait_s: for a shard that nodes are still copying.
        maps_files: read the files of nodes on this host instead of asking for bytes.
        cache: folder for shards of other nodes; None: no cache.
        cache_bytes: of all shards in it.
        connect: makes the link to a node that joined later.
        clock: for retries.
    """

    def __init__(  # noqa: PLR0913  # one field each of what a client may choose
        self,
        index: str | os.PathLike[str],
        links: Sequence[NodeLink],
        *,
        replicas: int = 1,
        source: str | os.PathLike[str] | None = None,
        wait_s: float = _WAIT_S,
        stage_wait_s: float = 0.0,
        maps_files: bool = True,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = 0,
        connect: Connector | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(index, read_options(verify="always", index_only=True))
        reader = self._open()
        self._clock: Clock = clock or SystemClock()
        self._nodes = KnownNodes(
            links,
            head=reader.head,
            shard_count=reader.shard_count,
            replicas=replicas,
            wait_s=wait_s,
            maps_files=maps_files,
            connect=connect,
            clock=self._clock,
        )
        self._stage_wait_s = stage_wait_s
        self._source_path = None if source is None else Path(source)
        self._source: Pack | None = None
        self._source_lock = threading.Lock()
        self._cache: CachedShards | None = None
        if cache is not None:
            self._cache = CachedShards(
                Path(cache), cache_bytes, self, self._pieces_of, self._nodes.is_mapped
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

    @property
    def tier_bytes(self) -> TierBytes:
        """From where the bytes of samples came so far, in this process."""
        return self._nodes.tiers

    @property
    def cache(self) -> CachedShards | None:
        """The shards of other nodes on local storage."""
        return self._cache

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
        self._nodes.refresh()
        for node, near in self._nodes.whole_readers():
            try:
                if out is None:
                    buffer, offsets = near.read_batch(ids)
                else:
                    offsets = near.read_batch_into(ids, out)
                    buffer = out[: offsets[-1]]
            except (CorruptPack, StorageError) as problem:
                self._nodes.drop_mapped(node, problem)
            else:
                self._nodes.count(mapped=len(buffer))
                return buffer, offsets
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
        source = None if self._source_path is None else self._open_source
        RemoteBatch(self, plan, ids, out).read(self._nodes, source, self._cache, self._waits())
        if self._cache is not None:
            self._cache.note_read(len(ids))
        return out[: plan.size], plan.offsets

    def views(self, samples: ArrayLike) -> list[memoryview]:
        """See `Pack.views`: without a copy if a node on this host holds all shards."""
        self._nodes.refresh()
        for node, near in self._nodes.whole_readers():
            try:
                return near.views(self._ids(samples, near))
            except (CorruptPack, StorageError) as problem:
                self._nodes.drop_mapped(node, problem)
        buffer, offsets = self.read_batch(samples)
        view = memoryview(buffer.data).toreadonly()
        return [view[begin:end] for begin, end in itertools.pairwise(offsets)]

    def expect(self, order: Iterator[NDArray[np.int64]]) -> None:
        """See `Pack.expect`: the cache copies shards in this order."""
        if self._cache is not None:
            self._nodes.refresh()
            self._cache.expect(order)

    def prefetch(self, samples: ArrayLike) -> None:
        """Take note that these samples are read next, of those that were announced (`expect`).

        Nothing is fetched by this: batches are fetched as a whole, many requests at a time.
        """
        if self._cache is not None:
            self._cache.announce(len(self._flat(samples)))

    @property
    def read_times_s(self) -> tuple[float, float]:
        """See `Pack.read_times_s`; of remote reads nothing is known."""
        return 0.0, 0.0

    def close(self) -> None:
        """Close the index, the cache and the connections."""
        if self._cache is not None:
            self._cache.close()
        super().close()
        self._nodes.close()

    def _waits(self) -> Callable[[], bool]:
        """Return what waits a moment, and says whether there was time left for that."""
        end_s = self._clock.now_s() + self._stage_wait_s

        def wait() -> bool:
            left_s = end_s - self._clock.now_s()
            if left_s <= 0:
                return False
            self._clock.wait(threading.Event(), min(_POLL_S, left_s))
            return True

        return wait

    def _pieces_of(self, shard: int) -> Iterator[bytes]:
        """Yield the bytes of a shard, for the cache."""
        length = int(self.index.shard_lengths[shard])
        for node in self._nodes.holders(shard):
            try:
                yield from self._pieces_of_node(node, shard, length)
            except RankLost as problem:  # the digest tells if what was sent so far is of use
                self._nodes.note_lost(node, problem)
                raise
            return
        if self._source_path is None:
            raise RankLost(
                "no node holds the shard",
                where=f"shard {shard}",
                fix="Start the nodes again, or give the pack on the shared file system as source",
            )
        with self._open_source().index.shard_path(shard).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def _pieces_of_node(self, node: str, shard: int, length: int) -> Iterator[bytes]:
        for offset in range(0, length, _PIECE_BYTES):
            piece = np.empty(min(_PIECE_BYTES, length - offset), np.uint8)
            if self._nodes.fetch_range(node, shard, offset, piece) == NOT_HELD:
                self._nodes.note_missing(node, shard)
                raise RankLost(
                    "a node does not hold the shard any longer",
                    where=node,
                    why=f"shard {shard}",
                    fix="It is read from elsewhere",
                )
            yield piece.tobytes()

    def _open_source(self) -> Pack:
        with self._source_lock:
            if self._source is None:
                assert self._source_path is not None
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


def open_remote(  # noqa: PLR0913  # one field each of what a client may choose
    index: str | os.PathLike[str],
    nodes: Sequence[str] | None = None,
    *,
    replicas: int = 1,
    source: str | os.PathLike[str] | None = None,
    token: str = "",
    tls: bool = False,
    wait_s: float = _WAIT_S,
    stage_wait_s: float = 0.0,
    maps_files: bool = True,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int = 0,
) -> RemotePack:
    """Open a pack whose shards nodes serve (``paceline store serve``).

    Args:
        index: folder with the pack's index, ``index.pace``; no shards are needed.
        nodes: their addresses, ``HOST:PORT``: as the nodes know each other. One that is up is
            enough: it names the others. None: those of this run, which was started with
            ``paceline run --data`` and this path; then replicas, source, token and tls are the
            run's.
        replicas: copies of each shard, as the nodes were started with.
        source: the whole pack, to read what no node has.
        token: that the nodes were started with; empty: the user's, which they have by default.
        tls: whether they were started with TLS.
        wait_s: for what one read asks of one node.
        stage_wait_s: how long to wait for a shard that no node has copied yet before it is read
            from the source. 0: not at all, so that a loop is never held up; with more, the shared
            file system is read once, by the nodes.
        maps_files: read the files of nodes on this host instead of asking for bytes.
        cache: folder on local storage, of this process alone, in which shards of other nodes are
            kept, copied ahead of a loader's order; None: there is none.
        cache_bytes: of all shards in it.

    Raises:
        NotFound: there is no index; or no nodes were given, and the run serves no such pack.
        UsageError: an address is none; a node refuses the token, or serves another pack; the cache
            is in use.
    """
    if nodes is None:
        served = find_served(index, environment())
        index, nodes, source = served.local, served.nodes, served.place
        replicas, token, tls = served.replicas, served.token, served.tls
    with open_packed(index, index_only=True) as opened:
        connect = tcp_connector(opened.identity, token, tls=tls)
    return RemotePack(
        index,
        [connect(node) for node in nodes],
        replicas=replicas,
        source=source,
        wait_s=wait_s,
        stage_wait_s=stage_wait_s,
        maps_files=maps_files,
        cache=cache,
        cache_bytes=cache_bytes,
        connect=connect,
    )
