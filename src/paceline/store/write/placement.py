"""The placing stage of packing: which shard takes each sample, and where in it.

It places samples in the order in which they come and yields values for the writing stage: bytes for
a shard, with the columns of the samples that they complete, and the end of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.native import crc32c
from paceline.store.format.layout import ALIGNMENT, HEADER_BYTES, padding
from paceline.store.write.columns import ExtentColumns, SampleColumns
from paceline.store.write.encoding import EncodedBatch, LargeChunk, LentBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.store.write.options import ShardLimits


class ShardPlacement:
    """Decides which shard takes each sample; knows lengths only, so it also plans a dry run.

    Args:
        limits: limits on the size of the shards.
        first_shard: the number of the first shard.
        closed: lengths of the shards that exist already, from the first on.
    """

    def __init__(
        self, limits: ShardLimits, first_shard: int = 0, closed: Sequence[int] = ()
    ) -> None:
        self._limits = limits
        self._first = first_shard
        self.closed = list(closed)  # lengths of the closed shards
        self.length = 0  # length of the open shard; 0 = no shard is open

    @property
    def shard(self) -> int:
        """The number of the open shard, or of the next one if none is open."""
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
            lengths: stored bytes of each sample.
            begins: offset of each sample from the first, and the end, shape (n + 1,).
        """
        base = self.length or HEADER_BYTES
        room = self.limit - base
        over = np.flatnonzero(begins[:-1] + lengths > room) if room >= 0 else np.zeros(1, int)
        return int(over[0]) if len(over) else len(lengths)

    def take_slice(
        self, lengths: NDArray[np.uint64], begins: NDArray[np.uint64], first: int
    ) -> BatchSlice | None:
        """Return which samples of a batch the open shard takes next; None = it takes none.

        Args:
            lengths: stored bytes of each sample.
            begins: offset of each sample in the batch, and the end, shape (n + 1,).
            first: the first sample to place.
        """
        end, base = len(lengths), int(begins[first])
        if base % ALIGNMENT:
            # Small samples that begin a shard move to its start: the next large one, which is
            # aligned, does not move as far. So a shard is the same however batches divide it.
            large = np.flatnonzero(lengths[first:] >= ALIGNMENT)
            end = first + int(large[0]) if len(large) else end
        relative = begins[first : end + 1] - np.uint64(base)
        count = self.fits(lengths[first:end], relative)
        if count == 0:
            return None
        stored = int(relative[count - 1]) + int(lengths[first + count - 1])
        return BatchSlice(
            first=first,
            count=count,
            offset=self.take(stored + padding(stored)),
            byte_count=stored,
        )

    def plan(
        self, lengths: NDArray[np.uint64], begins: NDArray[np.uint64]
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """Place samples without writing them; yield offsets and lengths of their extents."""
        if len(lengths) == 1 and self.is_chunked(int(lengths[0])):
            yield self._plan_chunks(int(lengths[0]))
            return
        first = 0
        while first < len(lengths):
            chosen = self.take_slice(lengths, begins, first)
            if chosen is None:
                self.close()
                continue
            yield chosen.offsets(begins), lengths[chosen.samples]
            first = chosen.samples.stop

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

    def _plan_chunks(self, length: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        self.close()
        offsets: list[int] = []
        sizes: list[int] = []
        while length:
            if sizes:
                self.close()
            sizes.append(min(length, self.limit - HEADER_BYTES))
            offsets.append(self.take(sizes[-1] + padding(sizes[-1])))
            length -= sizes[-1]
        return np.array(offsets, np.uint64), np.array(sizes, np.uint64)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSlice:
    """Consecutive samples of a batch that go to one shard.

    Attributes:
        first: the first sample.
        count: number of samples.
        offset: where the first sample begins in the shard.
        byte_count: from the beginning of the first to the end of the last; padding follows.
    """

    first: int
    count: int
    offset: int
    byte_count: int

    @property
    def samples(self) -> slice:
        """The samples among those of the batch."""
        return slice(self.first, self.first + self.count)

    def offsets(self, begins: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the offset of each sample in the shard, from its offset in the batch."""
        offsets: NDArray[np.uint64] = begins[self.samples] - begins[self.first]
        return offsets + np.uint64(self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedBytes:
    """Bytes to append to a shard, and the samples that they complete.

    Attributes:
        shard: number of the shard.
        data: the bytes, padded to the alignment unless they are part of a large sample.
        buffer: the buffer that holds `data`, lent again once `data` is written.
        samples: samples that these bytes complete, in the order of the source; None = the sample
            continues.
        lengths: lengths of these samples as they are read, in bytes.
        extents: extents of these samples, in all shards.
    """

    shard: int
    data: NDArray[np.uint8]
    buffer: LentBuffer | None = None
    samples: SampleColumns | None = None
    lengths: NDArray[np.uint64] | None = None
    extents: ExtentColumns | None = None


@dataclass(frozen=True, slots=True)
class ShardEnd:
    """The open shard gets no more bytes.

    Attributes:
        is_between_samples: whether a later packing may resume after this shard.
    """

    is_between_samples: bool


def place(
    batches: Iterator[EncodedBatch | LargeChunk], placement: ShardPlacement
) -> Iterator[PlacedBytes | ShardEnd]:
    """Yield the bytes for each shard, shard after shard, and the end of each shard."""
    for batch in batches:
        if isinstance(batch, LargeChunk):
            yield from _place_large(batch, batches, placement)
        else:
            yield from _place_batch(batch, placement)
    if placement.length:
        placement.close()
        yield ShardEnd(is_between_samples=True)


def _place_batch(
    batch: EncodedBatch, placement: ShardPlacement
) -> Iterator[PlacedBytes | ShardEnd]:
    begins, first = batch.begins, 0
    while first < len(batch.lengths):
        place = placement.take_slice(batch.stored_lengths, begins, first)
        if place is None:
            assert placement.length  # every sample of a batch fits an empty shard
            placement.close()
            yield ShardEnd(is_between_samples=True)
            continue
        chosen = place.samples
        # The padding is mostly there in the batch.
        begin, size = int(begins[first]), place.byte_count + padding(place.byte_count)
        first = chosen.stop
        data = batch.data[begin : min(begin + size, int(begins[first]))]
        yield PlacedBytes(
            shard=placement.shard,
            data=data,
            buffer=batch.buffer,
            samples=batch.samples[chosen],
            lengths=batch.lengths[chosen],
            extents=ExtentColumns(
                offsets=place.offsets(begins),
                lengths=batch.lengths[chosen],
                stored_lengths=batch.stored_lengths[chosen],
                shards=np.full(place.count, placement.shard, np.uint32),
                checksums=batch.checksums[chosen],
                codecs=batch.codecs[chosen],
            ),
        )
        if len(data) < size:
            yield PlacedBytes(shard=placement.shard, data=np.zeros(size - len(data), np.uint8))


def _place_large(
    chunk: LargeChunk,
    chunks: Iterator[EncodedBatch | LargeChunk],
    placement: ShardPlacement,
) -> Iterator[PlacedBytes | ShardEnd]:
    """Place a sample that comes in chunks, in one extent or, if no shard holds it, in several.

    Args:
        chunk: the first chunk of the sample.
        chunks: yields the other chunks next.
        placement: decides the shards.
    """
    length, samples = chunk.sample_length, chunk.samples
    must_close = placement.is_chunked(length) or placement.length + length > placement.limit
    if placement.length and must_close:
        placement.close()
        yield ShardEnd(is_between_samples=True)
    extents: list[tuple[int, int, int, int]] = []
    left, unplaced = length, chunk.data
    while left:
        if extents:
            placement.close()
            yield ShardEnd(is_between_samples=False)
        size = min(left, placement.limit - HEADER_BYTES)
        offset = placement.take(size + padding(size))
        checksum = 0
        for_extent = size
        while for_extent:
            if not len(unplaced):
                following = next(chunks)
                assert isinstance(following, LargeChunk)
                chunk, unplaced = following, following.data
            data, unplaced = unplaced[:for_extent], unplaced[for_extent:]
            checksum = crc32c(data.data, checksum)
            yield PlacedBytes(shard=placement.shard, data=data, buffer=chunk.buffer)
            for_extent -= len(data)
        yield PlacedBytes(shard=placement.shard, data=np.zeros(padding(size), np.uint8))
        extents.append((offset, size, placement.shard, checksum))
        left -= size
    yield PlacedBytes(
        shard=placement.shard,
        data=np.zeros(0, np.uint8),
        samples=_with_extent_count(samples, len(extents)),
        lengths=np.array([length], np.uint64),
        extents=_extents_of_chunks(extents),
    )


def _with_extent_count(samples: SampleColumns, count: int) -> SampleColumns:
    return replace(samples, extent_counts=np.array([count], np.uint32))


def _extents_of_chunks(extents: list[tuple[int, int, int, int]]) -> ExtentColumns:
    columns = np.array(extents, np.uint64).reshape(-1, 4)
    return ExtentColumns(
        offsets=columns[:, 0],
        lengths=columns[:, 1],
        stored_lengths=columns[:, 1],
        shards=columns[:, 2].astype(np.uint32),
        checksums=columns[:, 3].astype(np.uint32),
        codecs=np.zeros(len(columns), np.uint8),
    )
