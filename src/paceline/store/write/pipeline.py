"""Takes the samples of a source to shards, and their columns to the spool: the middle of packing.

A batch is read, encoded if asked for, placed in shards by the one thread that decides, and
written by another (`write/shards.py`). With a journal, what a killed run made durable is passed
over first.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import crc32c, encode
from paceline.store.format.layout import HEADER_BYTES, padding, shard_name
from paceline.store.write.journal import JOURNAL_NAME, Entry, Journal, ListingDigest
from paceline.store.write.options import PackProgress
from paceline.store.write.shards import BATCH_BYTES, Layout, Shard, ShardLimits, ShardWriter
from paceline.store.write.sorted_runs import Extents, Spool, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from paceline.store.write.options import PackOptions
    from paceline.store.write.partial import PackFolder
    from paceline.store.write.sources import Batch, Source

_log = logging.getLogger(__name__)

_ENCODE_BYTES = 64 << 20  # larger samples are stored as they are
_AUTO_RATIO = 0.9


def large_bytes(layout: Layout) -> int:
    """Return from what length on a sample is read in pieces."""
    return min(BATCH_BYTES, layout.limit - HEADER_BYTES)


class _Differs(Exception):
    """The source is not what the journal's entries from `entry` on were packed from."""

    def __init__(self, entry: int) -> None:
        self.entry = entry


class Packer:
    """Takes a source's samples to shards and their columns to the spool."""

    def __init__(
        self,
        source: Source,
        folder: PackFolder,
        options: PackOptions,
        limits: ShardLimits,
        on_progress: Callable[[PackProgress], None] | None,
        first_shard: int = 0,
    ) -> None:
        self._source = source
        self._folder = folder
        self._options = options
        self._on_progress = on_progress
        self._layout = Layout(limits, first_shard)
        self._large_bytes = large_bytes(self._layout)
        self._writer = ShardWriter(folder, self._layout, self._on_close)
        self._listing = ListingDigest()
        self._journal: Journal | None = None
        self._journaled_shards = self._journaled_runs = 0
        self._totals = source.totals()
        self.spool = Spool(folder.create, folder.close)
        self.sample_count = 0
        self.byte_count = 0
        self.reused_sample_count = 0
        self._reused_byte_count = 0

    @property
    def shards(self) -> list[Shard]:
        """The shards that are whole."""
        return self._writer.shards

    def stop(self) -> None:
        """End the writing thread."""
        self._writer.stop()

    def pack_all(self, left: list[Entry], header: dict[str, Any]) -> None:
        """Pack the whole source, from where what is `left` ends or the source differs."""
        while True:
            batches = self._source.batches(self._large_bytes)
            try:
                rest = self._pass_over(batches, left)
                break
            except _Differs as differs:
                left = left[: differs.entry]
        self._start(left, header)
        if rest is not None and len(rest):
            self._add(rest)
        for batch in batches:
            self._add(batch)
        self.finish()

    def add_all(self) -> None:
        """Pack the whole source without a journal."""
        for batch in self._source.batches(self._large_bytes):
            self._add(batch)
        self.finish()

    def finish(self) -> None:
        """Make the last shard and the spool durable."""
        self._writer.finish()
        self.spool.flush()

    def _pass_over(self, batches: Iterator[Batch], left: list[Entry]) -> Batch | None:
        """Pass over what is packed already; return what is left of the batch that it ends in."""
        self._listing = ListingDigest()
        passed = 0
        batch: Batch | None = None
        for k, entry in enumerate(left):
            while passed < entry.samples:
                if batch is None or not len(batch):
                    batch = next(batches, None)
                    if batch is None:
                        raise _Differs(k)
                count = min(entry.samples - passed, len(batch))
                self._listing.update(batch.samples, batch.lengths, slice(0, count))
                batch = batch.drop(count)
                passed += count
            if self._listing.text() != entry.listing:
                raise _Differs(k)
        return batch

    def _start(self, left: list[Entry], header: dict[str, Any]) -> None:
        self._folder.resumable = bool(left)
        for entry in left:
            self._writer.shards += entry.shards
            self.spool.files += entry.runs
        self._layout.closed += [one.length for one in self.shards]
        self._journaled_shards = len(self.shards)
        self._journaled_runs = len(self.spool.files)
        kept = {name for name, _ in self.spool.files}
        kept |= {shard_name(k) for k in range(len(self.shards))}
        self._folder.remove(name for name in self._folder.names() if name not in kept)
        if left:
            self.sample_count = self.reused_sample_count = left[-1].samples
            self.byte_count = self._reused_byte_count = left[-1].bytes
            _log.info("going on behind %s samples packed before", f"{self.sample_count:,}")
            self._tell()
        if self._source.kind:
            self._journal = Journal(self._folder.create(JOURNAL_NAME), header, left)

    def _add(self, batch: Batch) -> None:
        length = int(batch.lengths[0]) if len(batch) == 1 else 0
        if length > self._large_bytes:
            self._add_large(batch, length)
            return
        begins = batch.begins()
        buffer = self._writer.buffer(int(begins[-1]))
        checksums = batch.bodies.fill(buffer, begins)
        self._store(batch, buffer, begins, checksums)

    def _store(
        self,
        batch: Batch,
        buffer: NDArray[np.uint8],
        begins: NDArray[np.uint64],
        checksums: NDArray[np.uint32],
    ) -> None:
        stored, codecs = batch.lengths, np.zeros(len(batch), np.uint8)
        if self._options.codec != "none":
            ratio = _AUTO_RATIO if self._options.codec == "auto" else 1.0
            level = self._options.codec_level
            threads = len(os.sched_getaffinity(0))
            encoded = encode(
                buffer,
                begins[:-1],
                batch.lengths,
                level=level,
                keep_ratio=ratio,
                threads=threads,
            )
            buffer, stored, codecs = encoded.data, encoded.lengths, encoded.codecs
            begins = np.append(encoded.positions, np.uint64(len(buffer)))
        for part, shard, offsets in self._writer.add(buffer, begins, stored):
            extents = Extents(
                offsets=offsets,
                lengths=batch.lengths[part],
                stored_lengths=stored[part],
                shards=np.full(len(offsets), shard, np.uint32),
                checksums=checksums[part],
                codecs=codecs[part],
            )
            self._note(batch, part, extents)
        self._tell()

    def _add_large(self, batch: Batch, length: int) -> None:
        if self._options.codec != "none" and length <= min(_ENCODE_BYTES, self._layout.limit // 2):
            buffer = np.zeros(length + padding(length), np.uint8)
            done = 0
            while done < length:
                done += batch.bodies.read_into(buffer[done:length])
            checksum = np.array([crc32c(buffer[:length].data)], np.uint32)
            self._store(batch, buffer, batch.begins(), checksum)
            return
        extents = self._writer.add_large(length, batch.bodies.read_into)
        counts = np.array([len(extents)], np.uint32)
        batch = replace(batch, samples=replace(batch.samples, extent_counts=counts))
        self._note(batch, slice(0, 1), extents)
        self._tell()

    def _note(self, batch: Batch, part: slice, extents: Extents) -> None:
        samples = batch.samples if part == slice(0, len(batch)) else part_of(batch.samples, part)
        self._listing.update(batch.samples, batch.lengths, part)
        self.sample_count += len(samples)
        self.byte_count += int(extents.lengths.sum())
        self.spool.add(samples, extents)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                PackProgress(
                    sample_count=self.sample_count,
                    sample_total=self._totals.sample_count,
                    byte_count=self.byte_count,
                    byte_total=self._totals.byte_count,
                    reused_byte_count=self._reused_byte_count,
                )
            )

    def _on_close(self) -> Callable[[int, Shard], None] | None:
        """Make the columns of what the shard holds durable; return what notes it in the journal."""
        journal = self._journal
        if journal is None:
            return None
        self.spool.flush()
        runs = self.spool.files[self._journaled_runs :]
        self._journaled_runs = len(self.spool.files)
        samples, byte_count, listing = self.sample_count, self.byte_count, self._listing.text()

        def note(_number: int, _shard: Shard) -> None:
            shards = self.shards[self._journaled_shards :]
            self._journaled_shards = len(self.shards)
            journal.append(
                Entry(samples=samples, bytes=byte_count, listing=listing, shards=shards, runs=runs)
            )
            self._folder.resumable = True

        return note
