"""The writing stage of packing: writes, hashes and syncs shards.

Reading, writing, hashing (SHA-256 of each shard) and syncing overlap. Writing, hashing and syncing
have one thread each, in addition to the packing thread; each thread works in order. The threads
take whole batches, so their Python costs nothing per sample. ::

    packing thread   --data-->   writing thread    os.write, start_writeback
                     --data-->   hashing thread    SHA-256 of the open shard
                     --file, digest, state------> syncing thread    fsync, close, journal entry
"""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import start_writeback
from paceline.store.format.layout import ALIGNMENT, FileMagic, file_header, shard_name
from paceline.store.write.files import FileDigest, PackFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from paceline.store.write.files import PackFolder
    from paceline.store.write.journal import Journal, PackedState
    from paceline.store.write.placement import PlacedBytes

_PENDING = 8  # calls that wait for the writing and syncing threads
_WRITEBACK_BYTES = 32 << 20


@dataclass(slots=True)
class _OpenShard:
    """The shard that is being written.

    `file` belongs to the writing thread and `digest` to the hashing thread until `last`, the latest
    work given to either, is done; then both belong to the syncing thread.
    """

    file: PackFile
    digest: Any = field(default_factory=hashlib.sha256)
    last: tuple[Future[Any], ...] = ()


class ShardWriter:
    """Appends bytes to shards. Only the packing thread may call it.

    Args:
        folder: the folder for the shards.
        complete: shards that a killed `pack` has completed.
        journal: the journal that records what is durable; the syncing thread owns it.

    Attributes:
        shards: length and digest of each shard that is durable. The syncing thread appends to it;
            others may read it after `finish`.
    """

    def __init__(
        self,
        folder: PackFolder,
        complete: Sequence[FileDigest] = (),
        journal: Journal | None = None,
    ) -> None:
        self.shards = list(complete)
        self._folder = folder
        self._journal = journal
        self._open: _OpenShard | None = None
        self._pending: deque[Future[Any]] = deque()
        self._writing = ThreadPoolExecutor(1, "paceline-write")
        self._hashing = ThreadPoolExecutor(1, "paceline-hash")
        self._syncing = ThreadPoolExecutor(1, "paceline-sync")
        # Set by whichever thread fails first; whatever was written after that would be wrong.
        self._problem: BaseException | None = None

    @property
    def has_journal(self) -> bool:
        """Whether a journal records what is durable."""
        return self._journal is not None

    def write(self, placed: PlacedBytes) -> None:
        """Append bytes to their shard; create the shard if it is new."""
        if self._open is None:
            self._open = _OpenShard(self._folder.create(shard_name(placed.shard)))
            header = file_header(FileMagic.SHARD, placed.shard)
            self._append(self._open, np.frombuffer(header, np.uint8))
        if len(placed.data):
            self._append(self._open, placed.data)
            if placed.buffer is not None:
                placed.buffer.readers = self._open.last

    def close_shard(self, state: PackedState | None) -> None:
        """Close the open shard; it becomes durable in the background.

        Args:
            state: the state that the journal records once the shard is durable; None = nothing to
                record: a sample continues in the next shard, or there is no journal.
        """
        shard, self._open = self._open, None
        assert shard is not None
        self._submit(self._syncing, lambda: self._complete(shard, state))

    def finish(self) -> list[FileDigest]:
        """Wait until everything is durable; return all shards."""
        while self._pending:
            self._pending.popleft().result()
        return self.shards

    def stop(self) -> None:
        """End the threads once their work is done, or has failed."""
        for thread in (self._writing, self._hashing, self._syncing):
            thread.shutdown(wait=True)

    def _append(self, shard: _OpenShard, data: NDArray[np.uint8]) -> None:
        hashed = self._hashing.submit(shard.digest.update, data.data)
        written = self._submit(self._writing, lambda: _write(shard.file, data))
        shard.last = (written, hashed)

    def _complete(self, shard: _OpenShard, state: PackedState | None) -> None:
        """Make a shard durable, then record it in the journal. Runs in the syncing thread."""
        for work in shard.last:
            work.result()
        assert shard.file.length % ALIGNMENT == 0
        self._folder.close(shard.file)
        self.shards.append(FileDigest(shard.file.length, shard.digest.digest()))
        if self._journal is not None and state is not None:
            self._journal.append(state, self.shards)

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[], None]) -> Future[Any]:
        while len(self._pending) > _PENDING or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()

        def run() -> None:
            if self._problem is not None:
                raise self._problem
            try:
                work()
            except BaseException as problem:
                self._problem = problem
                raise

        future = thread.submit(run)
        self._pending.append(future)
        return future


def _write(file: PackFile, data: NDArray[np.uint8]) -> None:
    """Append to a shard. Runs in the writing thread."""
    file.write(data.data)
    waiting = file.length - file.begun
    if waiting >= _WRITEBACK_BYTES:  # so that the sync at the end finds little to do
        start_writeback(file.descriptor, file.begun, waiting)
        file.begun = file.length
