r"""Packs the samples of a source: the stages that a sample passes, and the thread of each stage.

::

    source --> read, encode --> place --> write --> journal
               encoding.py placement.py shards.py journal.py
                                    \--> columns, sorted-run files
    '------------- packing thread ------'  '- writing, hashing and syncing threads -'

Each stage is a generator that takes values from the previous stage and yields values for the next;
nothing calls back. The packing thread, which is the caller's, pulls the source, fills buffers,
places samples and collects their columns. It does not touch a buffer that it gave to a shard until
`BufferRing` lends the buffer again. When a shard ends, `PackedState` travels to the syncing thread,
which writes it to the journal once the shard is durable; the packing thread does not wait for that.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.store.format.layout import shard_name
from paceline.store.write.encoder import DICTIONARY_NAME
from paceline.store.write.encoding import read_batches
from paceline.store.write.files import FileDigest
from paceline.store.write.index.sorted_runs import SortedRunWriter
from paceline.store.write.journal import Journal, PackedState, ResumePoint, resume
from paceline.store.write.options import PackProgress
from paceline.store.write.placement import PlacedBytes, ShardPlacement, place
from paceline.store.write.shards import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from paceline.store.write.encoder import SampleEncoder
    from paceline.store.write.encoding import EncodedBatch, LargeChunk
    from paceline.store.write.files import PackFolder
    from paceline.store.write.journal import JournalEntry
    from paceline.store.write.options import ShardLimits
    from paceline.store.write.sources.source import OpenSource, SourceTotals

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSamples:
    """What was packed from a source.

    Attributes:
        sample_count: samples in the source.
        byte_count: bytes of these samples.
        reused_sample_count: samples that an earlier, killed packing had already packed.
        shards: length and digest of each shard, in order.
        sorted_runs: names of the sorted-run files.
    """

    sample_count: int
    byte_count: int
    reused_sample_count: int
    shards: list[FileDigest]
    sorted_runs: list[str]


def pack_resumable(
    source: OpenSource,
    folder: PackFolder,
    encoder: SampleEncoder,
    limits: ShardLimits,
    *,
    header: dict[str, Any],
    entries: list[JournalEntry],
    on_progress: Callable[[PackProgress], None] | None,
) -> PackedSamples:
    """Pack a source into a folder of its own, with a journal if the source can be read again.

    Args:
        source: the source, which is read to its end.
        folder: the folder for shards, sorted-run files and journal.
        encoder: compresses the samples.
        limits: limits on the size of the shards.
        header: first line of the journal.
        entries: lines of the journal that a killed `pack` left.
        on_progress: called after each batch.
    """
    folder.resumable = bool(entries)  # passing over them may take long, and be interrupted
    point = resume(
        source,
        entries if encoder.resume(has_entries=bool(entries)) else [],
        limits.large_bytes,
    )
    shards = [shard for entry in point.entries for shard in entry.shards]
    sorted_runs = [file for entry in point.entries for file in entry.sorted_runs]
    kept = [name for name, _ in sorted_runs]
    _keep_only(folder, len(shards), [*kept, DICTIONARY_NAME] if point.entries else kept)
    folder.resumable = bool(point.entries)
    journal = Journal(folder, header, point.entries) if source.resume_key else None
    progress = _PackedColumns(folder, source.totals(), on_progress, point, sorted_runs)
    placement = ShardPlacement(limits, closed=[shard.length for shard in shards])
    writer = ShardWriter(folder, shards, journal)
    return _run(read_batches(point.batches, limits, encoder), placement, writer, progress)


def pack_after_existing(
    source: OpenSource,
    folder: PackFolder,
    encoder: SampleEncoder,
    limits: ShardLimits,
    *,
    first_shard: int,
    on_progress: Callable[[PackProgress], None] | None,
) -> PackedSamples:
    """Pack a source into new shards, numbered after those of an existing pack, without a journal.

    Args:
        source: the source, which is read to its end.
        folder: the folder of the pack.
        encoder: compresses the samples.
        limits: limits on the size of the shards.
        first_shard: the number of the first new shard.
        on_progress: called after each batch.
    """
    placement = ShardPlacement(limits, first_shard)
    point = ResumePoint([], source.batches(limits.large_bytes))
    progress = _PackedColumns(folder, source.totals(), on_progress, point, [])
    batches = read_batches(point.batches, limits, encoder)
    return _run(batches, placement, ShardWriter(folder), progress)


def _run(
    batches: Iterator[EncodedBatch | LargeChunk],
    placement: ShardPlacement,
    writer: ShardWriter,
    columns: _PackedColumns,
) -> PackedSamples:
    try:
        for placed in place(batches, placement):
            if isinstance(placed, PlacedBytes):
                writer.write(placed)
                columns.add(placed)
            else:
                is_recorded = placed.is_between_samples and writer.has_journal
                writer.close_shard(columns.state() if is_recorded else None)
        shards = writer.finish()
    finally:
        writer.stop()
    return columns.packed(shards)


class _PackedColumns:
    """Counts samples and writes their columns to sorted-run files; the packing thread owns it."""

    def __init__(
        self,
        folder: PackFolder,
        totals: SourceTotals,
        on_progress: Callable[[PackProgress], None] | None,
        point: ResumePoint,
        sorted_runs: list[tuple[str, int]],
    ) -> None:
        last = point.entries[-1] if point.entries else None
        self._totals = totals
        self._on_progress = on_progress
        self._listing = point.listing
        self._sorted_runs = SortedRunWriter(folder, sorted_runs)
        self._sample_count = self._reused_sample_count = last.samples if last else 0
        self._byte_count = self._reused_byte_count = last.bytes if last else 0
        if last is not None:
            _LOG.info("resuming after %s samples", f"{last.samples:,}")
            self._report()

    def add(self, placed: PlacedBytes) -> None:
        """Add the samples that these bytes complete, if any."""
        if placed.samples is None or placed.lengths is None or placed.extents is None:
            return
        self._listing.update(placed.samples, placed.lengths)
        self._sorted_runs.add(placed.samples, placed.extents)
        self._sample_count += len(placed.samples)
        self._byte_count += int(placed.lengths.sum())
        self._report()

    def state(self) -> PackedState:
        """Make the columns so far durable and return how far packing has come."""
        self._sorted_runs.flush()
        return PackedState(
            samples=self._sample_count,
            bytes=self._byte_count,
            listing=self._listing.text(),
            sorted_runs=list(self._sorted_runs.files),
        )

    def packed(self, shards: list[FileDigest]) -> PackedSamples:
        """Make the last columns durable and return what was packed from the source."""
        self._sorted_runs.flush()
        return PackedSamples(
            sample_count=self._sample_count,
            byte_count=self._byte_count,
            reused_sample_count=self._reused_sample_count,
            shards=shards,
            sorted_runs=[name for name, _ in self._sorted_runs.files],
        )

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                PackProgress(
                    sample_count=self._sample_count,
                    sample_total=self._totals.sample_count,
                    byte_count=self._byte_count,
                    byte_total=self._totals.byte_count,
                    reused_byte_count=self._reused_byte_count,
                )
            )


def _keep_only(folder: PackFolder, shard_count: int, others: list[str]) -> None:
    """Remove the files that a killed `pack` left, except shards and others to keep."""
    kept = {*others, *(shard_name(k) for k in range(shard_count))}
    folder.remove(name for name in folder.names() if name not in kept)
