"""Writes shards: samples one behind the other, each shard hashed and made durable on the way.

What is read next, what is written, hashed (SHA-256 of whole shards) and synced overlap: each has a
thread, beside the caller's, and does its work in order. They take whole batches, so their Python
costs nothing a sample.
"""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import crc32c, start_writeback
from paceline.store.format.layout import (
    ALIGNMENT,
    HEADER_BYTES,
    FileMagic,
    file_header,
    padding,
    shard_name,
)
from paceline.store.write.sorted_runs import Extents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from paceline.store.write.partial import PackFile, PackFolder

BATCH_BYTES = 8 << 20
_PENDING = 2  # batches that wait to be written, besides the one being filled
_WRITEBACK_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLimits:
    """How large shards get.

    Attributes:
        shard_bytes: a shard is closed before it would grow beyond this.
        growth_shards: for sources of unknown size, the limit doubles after so many shards; 0 =
            never. So the number of shards grows with the logarithm of what comes.
        max_bytes: that growth ends at.
    """

    shard_bytes: int
    growth_shards: int = 0
    max_bytes: int = 16 << 30

    def limit(self, shard: int) -> int:
        """Return the limit of the `shard`-th shard, in bytes."""
        if not self.growth_shards:
            return self.shard_bytes
        doubled = self.shard_bytes << min(shard // self.growth_shards, 40)
        return max(min(doubled, self.max_bytes), self.shard_bytes)


@dataclass(slots=True)
class Shard:
    """A shard that is whole: its length and digest, for the index."""

    length: int
    digest: bytes


class Layout:
    """Decides which shard takes each sample; knows lengths only, so it also plans."""

    def __init__(self, limits: ShardLimits, first_shard: int = 0, shard_count: int = 0) -> None:
        self._limits = limits
        self._first = first_shard
        self.closed = [0] * shard_count  # lengths of the shards that are closed
        self.length = 0  # of the open one; 0 = there is none

    @property
    def shard(self) -> int:
        """The number of the open shard, or of the next."""
        return self._first + len(self.closed)

    @property
    def limit(self) -> int:
        """Bytes that the open shard may have."""
        return self._limits.limit(self.shard)

    def is_chunked(self, length: int) -> bool:
        """Return whether a sample is larger than a shard of its own."""
        return length > self.limit - HEADER_BYTES

    def fits(self, lengths: NDArray[np.uint64], begins: NDArray[np.uint64]) -> int:
        """Return how many of the next samples the open shard takes.

        Args:
            lengths: stored bytes of each.
            begins: where each lies relative to the first, shape (n + 1,).
        """
        base = self.length or HEADER_BYTES
        room = self.limit - base
        over = np.flatnonzero(begins[:-1] + lengths > room) if room >= 0 else np.zeros(1, int)
        return int(over[0]) if len(over) else len(lengths)

    def plan(self, lengths: NDArray[np.uint64], begins: NDArray[np.uint64]) -> int:
        """Place samples that nobody writes; return how many extents they take."""
        if len(lengths) == 1 and self.is_chunked(int(lengths[0])):
            self.close()
            left, extents = int(lengths[0]), 0
            while left:
                if extents:
                    self.close()
                size = min(left, self.limit - HEADER_BYTES)
                self.take(size + padding(size))
                left -= size
                extents += 1
            return extents
        first = 0
        while first < len(lengths):
            count = self.fits(lengths[first:], begins[first:] - begins[first])
            if count == 0:
                self.close()
                continue
            self.take(int(begins[first + count] - begins[first]))
            first += count
        return len(lengths)

    def take(self, byte_count: int) -> int:
        """Count bytes, padding included, that go to the open shard; return their offset."""
        if self.length == 0:
            self.length = HEADER_BYTES
        offset = self.length
        self.length += byte_count
        return offset

    def close(self) -> None:
        """Close the open shard, if there is one."""
        if self.length:
            self.closed.append(self.length)
            self.length = 0


class ShardWriter:
    """Appends samples to shards.

    Args:
        folder: takes the files.
        layout: says where what goes.
        on_close: is called in the caller's thread when a shard is about to be closed; what it
            returns is called in the writing thread once the shard is durable.
    """

    def __init__(
        self,
        folder: PackFolder,
        layout: Layout,
        on_close: Callable[[], Callable[[int, Shard], None] | None],
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._on_close = on_close
        self._file: PackFile | None = None
        self._digest = hashlib.sha256()
        self._buffers = [np.empty(0, np.uint8) for _ in range(_PENDING + 2)]
        self._in_use: list[tuple[Future[Any], ...]] = [()] * len(self._buffers)
        self._turn = 0
        self._pending: deque[Future[Any]] = deque()
        self._writing = ThreadPoolExecutor(1, "paceline-write")
        self._hashing = ThreadPoolExecutor(1, "paceline-hash")
        self._syncing = ThreadPoolExecutor(1, "paceline-sync")
        self._last: tuple[Future[Any], ...] = ()  # what the last piece waits for
        self._problem: BaseException | None = None  # whatever comes after a failure would be wrong
        self.shards: list[Shard] = []

    def buffer(self, byte_count: int) -> NDArray[np.uint8]:
        """Return memory for the next batch; what is in it is written before it is lent again."""
        self._turn = (self._turn + 1) % len(self._buffers)
        for work in self._in_use[self._turn]:
            work.result()
        self._in_use[self._turn] = ()
        if len(self._buffers[self._turn]) < byte_count:
            self._buffers[self._turn] = np.empty(max(byte_count, BATCH_BYTES), np.uint8)
        return self._buffers[self._turn][:byte_count]

    def add(
        self, batch: NDArray[np.uint8], begins: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> Iterator[tuple[slice, int, NDArray[np.uint64]]]:
        """Append samples; yield, shard by shard, which ones, the shard and their offsets.

        Args:
            batch: the bytes, each sample padded to the alignment.
            begins: where each begins in `batch`, and its end, shape (n + 1,).
            lengths: stored bytes of each, none larger than a shard.
        """
        first = 0
        while first < len(lengths):
            relative = begins[first:] - begins[first]
            count = self._layout.fits(lengths[first:], relative)
            if count == 0:
                assert self._layout.length  # it fits an empty one
                self.close_shard()
                continue
            offset = self._append(batch[int(begins[first]) : int(begins[first + count])])
            yield (
                slice(first, first + count),
                self._layout.shard,
                relative[:count] + np.uint64(offset),
            )
            first += count

    def add_large(self, length: int, read_into: Callable[[NDArray[np.uint8]], int]) -> Extents:
        """Append one sample that is larger than a batch, in chunks if it is larger than a shard.

        Args:
            length: of the whole.
            read_into: fills memory with what comes next and returns how many bytes that were; it
                raises when the sample turns out not to have `length` bytes.
        """
        is_chunked = self._layout.is_chunked(length)
        if self._layout.length and (
            is_chunked or self._layout.length + length > self._layout.limit
        ):
            self.close_shard()
        extents: list[tuple[int, int, int, int]] = []
        left = length
        while left:
            if extents:
                self.close_shard(amid_sample=True)
            size = min(left, self._layout.limit - HEADER_BYTES)
            offset = self._append(None)
            shard = self._layout.shard
            checksum = done = 0
            while done < size:
                buffer = self.buffer(min(size - done, BATCH_BYTES))
                piece = buffer[: read_into(buffer)]
                assert len(piece)
                checksum = crc32c(piece.data, checksum)
                self._append(piece)
                done += len(piece)
            self._append(np.zeros(padding(size), np.uint8))
            extents.append((offset, size, shard, checksum))
            left -= size
        columns = np.array(extents, np.uint64).reshape(-1, 4)
        return Extents(
            offsets=columns[:, 0],
            lengths=columns[:, 1],
            stored_lengths=columns[:, 1],
            shards=columns[:, 2].astype(np.uint32),
            checksums=columns[:, 3].astype(np.uint32),
            codecs=np.zeros(len(columns), np.uint8),
        )

    def close_shard(self, *, amid_sample: bool = False) -> None:
        """Close the open shard, if there is one; it becomes durable in the background."""
        if self._file is None:
            return
        assert self._layout.length % ALIGNMENT == 0
        file, self._file = self._file, None
        number = self._layout.shard
        then = None if amid_sample else self._on_close()
        digest, self._digest = self._digest, hashlib.sha256()
        last, self._last = self._last, ()
        self._layout.close()

        def finish() -> None:
            for work in last:
                work.result()
            self._folder.close(file)
            shard = Shard(file.length, digest.digest())
            self.shards.append(shard)
            if then is not None:
                then(number, shard)

        self._submit(self._syncing, finish)

    def finish(self) -> None:
        """Close the last shard and wait until everything is durable."""
        self.close_shard()
        while self._pending:
            self._pending.popleft().result()

    def stop(self) -> None:
        """End the threads once what they were given is done, or has failed."""
        for thread in (self._writing, self._hashing, self._syncing):
            thread.shutdown(wait=True)

    def _append(self, data: NDArray[np.uint8] | None) -> int:
        """Write to the open shard, a new one if need be; return the offset of `data`."""
        if self._file is None:
            self._file = self._folder.create(shard_name(self._layout.shard))
            head = file_header(FileMagic.SHARD, self._layout.shard)
            self._write(self._file, np.frombuffer(head, np.uint8))
        offset = self._layout.take(0 if data is None else len(data))
        if data is not None and len(data):
            self._in_use[self._turn] = self._write(self._file, data)
        return offset

    def _write(self, file: PackFile, data: NDArray[np.uint8]) -> tuple[Future[Any], ...]:
        def write() -> None:
            file.write(data.data)
            waiting = file.length - file.begun
            if waiting >= _WRITEBACK_BYTES:  # so that the sync at the end finds little to do
                start_writeback(file.descriptor, file.begun, waiting)
                file.begun = file.length

        hashed = self._hashing.submit(self._digest.update, data.data)
        self._last = (self._submit(self._writing, write), hashed)
        return self._last

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[], None]) -> Future[Any]:
        while len(self._pending) > 4 * _PENDING or (self._pending and self._pending[0].done()):
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
