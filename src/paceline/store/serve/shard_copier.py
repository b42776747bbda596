"""Copies shards to local storage, from peers or from the source, a few at a time in threads."""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import StorageError
from paceline.store.serve.links import NOT_HELD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.store.read.pack import Pack
    from paceline.store.serve.links import NodeLink
    from paceline.store.serve.local_shards import LocalShards
    from paceline.store.serve.staging import StageShard

_PIECE_BYTES = 8 << 20


class ShardCopier:
    """The copies of one node that are under way.

    Args:
        pack: the source.
        shards: where copies go.
        link_to: the link to a peer.
        wait_s: for a piece that a peer sends.
        at_once: copies under way at most.
        on_bytes: called with bytes that came, and whether from the source; from any thread.
    """

    def __init__(
        self,
        pack: Pack,
        shards: LocalShards,
        link_to: Callable[[str], NodeLink],
        wait_s: float,
        at_once: int,
        on_bytes: Callable[[int, bool], None] = lambda *_: None,
    ) -> None:
        self.source_bytes = 0  # read so far, as is the next
        self.peer_bytes = 0
        self._lock = threading.Lock()  # of these two: copies run beside each other
        self._pack = pack
        self._shards = shards
        self._link_to = link_to
        self._wait_s = wait_s
        self._on_bytes = on_bytes
        self._threads = ThreadPoolExecutor(at_once, "paceline-stage")
        self._running: dict[Future[None], StageShard] = {}

    def __len__(self) -> int:
        """Return how many copies are under way."""
        return len(self._running)

    def start(self, stage: StageShard) -> None:
        """Begin a copy."""
        self._running[self._threads.submit(self._copy, stage)] = stage

    def finished(self) -> Iterator[tuple[StageShard, BaseException | None]]:
        """Yield the copies that have ended since the last call, each with what went wrong."""
        for future in [future for future in self._running if future.done()]:
            yield self._running.pop(future), future.exception()

    def wait(self) -> None:
        """Wait for the copies that are under way."""
        futures.wait(list(self._running))

    def close(self) -> None:
        """Wait for the copies that are under way; begin no others."""
        self._threads.shutdown(cancel_futures=True)

    def _copy(self, stage: StageShard) -> None:
        pieces = self._pieces_of_peer(stage) if stage.peer else self._pieces_of_source(stage)
        origin = stage.peer or str(self._pack.index.shard_path(stage.shard))
        self._shards.write(stage.shard, pieces, origin)

    def _pieces_of_source(self, stage: StageShard) -> Iterator[bytes]:
        with self._pack.index.shard_path(stage.shard).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                with self._lock:
                    self.source_bytes += len(piece)
                self._on_bytes(len(piece), True)
                yield piece

    def _pieces_of_peer(self, stage: StageShard) -> Iterator[bytes]:
        link, length = self._link_to(stage.peer), self._shards.lengths[stage.shard]
        for offset in range(0, length, _PIECE_BYTES):
            piece = np.empty(min(_PIECE_BYTES, length - offset), np.uint8)
            if link.fetch_range(stage.shard, offset, piece, self._wait_s) == NOT_HELD:
                raise StorageError(
                    "a peer does not hold the shard any longer",
                    where=stage.peer,
                    why=f"shard {stage.shard}",
                    fix="It is copied from elsewhere",
                )
            with self._lock:
                self.peer_bytes += len(piece)
            self._on_bytes(len(piece), False)
            yield piece.tobytes()
