"""The placing stage of packing: which shard takes each sample, and where in it.

It decides in the order in which samples come and gives values to the writing stage: bytes for a
shard, with the columns of the samples that they complete, and the end of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.native import crc32c
from paceline.store.format.layout import HEADER_BYTES, padding
from paceline.store.write.columns import ExtentColumns, SampleColumns
from paceline.store.write.encoding import EncodedBatch, LargeChunk, LentBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.store.write.placement import ShardPlacement


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedBytes:
    """Bytes that go to the end of a shard, and the samples that are complete with them.

    Attributes:
        shard: its number.
        data: padded to the alignment, but for what is part of a large sample.
        buffer: what `data` lies in, lent again once `data` is written.
        samples: that are complete, in the order of the source; None = the sample goes on.
        lengths: of these samples, in bytes as they are read.
        extents: of these samples, in all shards.
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
        is_between_samples: a packing that resumes may begin behind it.
    """

    is_between_samples: bool


def place(
    batches: Iterator[EncodedBatch | LargeChunk], placement: ShardPlacement
) -> Iterator[PlacedBytes | ShardEnd]:
    """Yield what goes to which shard, shard after shard, and the end of each."""
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
        relative = begins[first:] - begins[first]
        count = placement.fits(batch.stored_lengths[first:], relative)
        if count == 0:
            assert placement.length  # every sample of a batch fits an empty shard
            placement.close()
            yield ShardEnd(is_between_samples=True)
            continue
        chosen = slice(first, first + count)
        first += count
        data = batch.data[int(begins[chosen.start]) : int(begins[first])]
        offset = placement.take(len(data))
        yield PlacedBytes(
            shard=placement.shard,
            data=data,
            buffer=batch.buffer,
            samples=batch.samples[chosen],
            lengths=batch.lengths[chosen],
            extents=ExtentColumns(
                offsets=relative[:count] + np.uint64(offset),
                lengths=batch.lengths[chosen],
                stored_lengths=batch.stored_lengths[chosen],
                shards=np.full(count, placement.shard, np.uint32),
                checksums=batch.checksums[chosen],
                codecs=batch.codecs[chosen],
            ),
        )


def _place_large(
    chunk: LargeChunk,
    chunks: Iterator[EncodedBatch | LargeChunk],
    placement: ShardPlacement,
) -> Iterator[PlacedBytes | ShardEnd]:
    """Place a sample that comes in chunks, in one extent or, if no shard holds it, in several.

    Args:
        chunk: the first.
        chunks: the others come next.
        placement: of the shards.
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
