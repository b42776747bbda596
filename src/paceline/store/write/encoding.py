"""The reading stage of packing: fills buffers with the samples of a batch, and has them encoded.

Samples lie in a buffer as they will in a shard, each padded to the alignment. A sample that is
larger than a buffer comes in chunks, which are not encoded.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.native import crc32c
from paceline.store.format.layout import aligned_begins, padding
from paceline.store.write.columns import SampleColumns
from paceline.store.write.encoder import (
    LEARNING_BYTES,
    LEARNING_SAMPLES,
    MIN_LEARNING_BYTES,
    ReadSamples,
)
from paceline.store.write.sources.source import BATCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.store.write.encoder import SampleEncoder
    from paceline.store.write.options import ShardLimits
    from paceline.store.write.sources.source import SourceBatch

_BUFFERS = 4  # one is being filled, one is placed, two wait to be written


@dataclass(slots=True)
class LentBuffer:
    """Memory for a batch.

    Attributes:
        memory: at least as large as what was asked for.
        readers: latest work of each other thread that reads the buffer. A thread does its work in
            order, so when the latest is done, all is.
    """

    memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    readers: tuple[Future[Any], ...] = ()


class BufferRing:
    """Lends buffers in turn, each again once nothing reads it any more.

    The packing thread owns it: only that thread lends buffers and gives them readers.
    """

    def __init__(self) -> None:
        self._buffers = [LentBuffer() for _ in range(_BUFFERS)]
        self._turn = 0

    def lend(self, byte_count: int) -> LentBuffer:
        """Wait for the next buffer and return it.

        Raises:
            BaseException: what made a reader fail.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        for reader in buffer.readers:
            reader.result()
        buffer.readers = ()
        if len(buffer.memory) < byte_count:
            buffer.memory = np.empty(max(byte_count, BATCH_BYTES), np.uint8)
        return buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBatch:
    """Samples as they are stored, none larger than a shard.

    Attributes:
        samples: columns of the samples.
        lengths: length of each sample as it was read.
        data: bytes of all samples, each padded to the alignment.
        begins: offset of each sample in `data`, and the end, shape (n + 1,).
        stored_lengths: length of each sample as it is stored.
        checksums: CRC-32C of each sample as it was read.
        codecs: codec of each sample.
        buffer: the buffer that holds `data`; None = `data` is encoded and has memory of its own.
    """

    samples: SampleColumns
    lengths: NDArray[np.uint64]
    data: NDArray[np.uint8]
    begins: NDArray[np.uint64]
    stored_lengths: NDArray[np.uint64]
    checksums: NDArray[np.uint32]
    codecs: NDArray[np.uint8]
    buffer: LentBuffer | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeChunk:
    """The next bytes of a sample that is larger than a batch; its chunks follow each other."""

    samples: SampleColumns
    sample_length: int
    data: NDArray[np.uint8]
    buffer: LentBuffer


def read_batches(
    batches: Iterator[SourceBatch], limits: ShardLimits, encoder: SampleEncoder
) -> Iterator[EncodedBatch | LargeChunk]:
    """Yield the samples of a source with their bytes, as they are to be stored.

    Args:
        batches: the batches of the source.
        limits: limits on the size of the shards, which decide what a large sample is.
        encoder: compresses samples; it learns from the first ones.

    Raises:
        StorageError: a sample cannot be read or has changed.
        BaseException: what made a reader of a buffer fail.
    """
    first: list[EncodedBatch] = []
    for read in _read(batches, limits, encoder.max_bytes(limits)):
        if encoder.must_learn and isinstance(read, EncodedBatch):
            first.append(_with_own_memory(read))
            size = sum(len(batch.data) for batch in first)
            count = sum(len(batch.lengths) for batch in first)
            if size >= LEARNING_BYTES or count >= LEARNING_SAMPLES:
                encoder.learn(_joined(first))
                yield from _taken(first, encoder)
            continue
        # A chunk's buffer cannot wait.
        if first and sum(len(batch.data) for batch in first) >= MIN_LEARNING_BYTES:
            encoder.learn(_joined(first))
        yield from _taken(first, encoder)
        yield _encoded(read, encoder) if isinstance(read, EncodedBatch) else read
    if first:
        encoder.learn(_joined(first))
    yield from _taken(first, encoder)


def _taken(first: list[EncodedBatch], encoder: SampleEncoder) -> Iterator[EncodedBatch]:
    """Yield the batches encoded, and take them from the list."""
    while first:
        yield _encoded(first.pop(0), encoder)


def _joined(first: list[EncodedBatch]) -> ReadSamples:
    sizes = np.cumsum([0, *(len(batch.data) for batch in first[:-1])], dtype=np.uint64)
    return ReadSamples(
        data=np.concatenate([batch.data for batch in first]),
        begins=np.concatenate(
            [batch.begins[:-1] + size for batch, size in zip(first, sizes, strict=True)]
        ),
        lengths=np.concatenate([batch.lengths for batch in first]),
    )


def _encoded(batch: EncodedBatch, encoder: SampleEncoder) -> EncodedBatch:
    encoded = encoder.encode(ReadSamples(batch.data, batch.begins[:-1], batch.lengths))
    if encoded is None:
        return batch
    return replace(
        batch,
        data=encoded.data,
        begins=np.append(encoded.positions, np.uint64(len(encoded.data))),
        stored_lengths=encoded.lengths,
        codecs=encoded.codecs,
        buffer=None,
    )


def _with_own_memory(batch: EncodedBatch) -> EncodedBatch:
    return batch if batch.buffer is None else replace(batch, data=batch.data.copy(), buffer=None)


def _read(
    batches: Iterator[SourceBatch], limits: ShardLimits, max_encoded_bytes: int
) -> Iterator[EncodedBatch | LargeChunk]:
    """Yield the samples with their bytes, as they were read."""
    ring = BufferRing()
    large_bytes = limits.large_bytes
    for batch in batches:
        length = int(batch.lengths[0]) if len(batch) == 1 else 0
        if length <= large_bytes:
            yield _read_batch(batch, ring)
        elif length <= max_encoded_bytes:
            yield _read_one_large(batch, length)
        else:
            yield from _read_chunks(batch, length, ring)


def _read_batch(batch: SourceBatch, ring: BufferRing) -> EncodedBatch:
    begins = aligned_begins(batch.lengths)
    buffer = ring.lend(int(begins[-1]))
    data = buffer.memory[: int(begins[-1])]
    return _as_read(batch, data, begins, batch.bodies.fill(data, begins), buffer)


def _read_one_large(batch: SourceBatch, length: int) -> EncodedBatch:
    data = np.zeros(length + padding(length), np.uint8)
    done = 0
    while done < length:
        done += batch.bodies.read_into(data[done:length])
    checksums = np.array([crc32c(data[:length].data)], np.uint32)
    return _as_read(batch, data, aligned_begins(batch.lengths), checksums, None)


def _as_read(
    batch: SourceBatch,
    data: NDArray[np.uint8],
    begins: NDArray[np.uint64],
    checksums: NDArray[np.uint32],
    buffer: LentBuffer | None,
) -> EncodedBatch:
    return EncodedBatch(
        samples=batch.samples,
        lengths=batch.lengths,
        data=data,
        begins=begins,
        stored_lengths=batch.lengths,
        checksums=checksums,
        codecs=np.zeros(len(batch), np.uint8),
        buffer=buffer,
    )


def _read_chunks(batch: SourceBatch, length: int, ring: BufferRing) -> Iterator[LargeChunk]:
    left = length
    while left:
        buffer = ring.lend(min(left, BATCH_BYTES))
        count = batch.bodies.read_into(buffer.memory[: min(left, BATCH_BYTES)])
        assert count
        yield LargeChunk(
            samples=batch.samples,
            sample_length=length,
            data=buffer.memory[:count],
            buffer=buffer,
        )
        left -= count
