"""Packs a source of samples into a new pack.

Bodies stream through a few buffers (`pipeline.py`) and columns through files (`sorted_runs.py`), so
memory is bounded whatever the source holds. `partial.py` and `journal.py` make packing
crash-safe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import UsageError, os_errors_as
from paceline.store.format.layout import (
    FORMAT_VERSION,
    INDEX_NAME,
    Section,
    aligned_begins,
)
from paceline.store.write.encoder import SampleEncoder
from paceline.store.write.index.build import (
    IndexMetadata,
    needs_dictionary,
    planned_bytes,
    write_index,
)
from paceline.store.write.index.sorted_runs import open_sorted_run
from paceline.store.write.index.stored import IndexLayout
from paceline.store.write.journal import read_journal
from paceline.store.write.options import (
    PackOptions,
    PackProgress,
    PackSummary,
    check_codec,
    shard_limits,
)
from paceline.store.write.parity import groups, parity_length, write_all_parity
from paceline.store.write.partial import PartialPack, check_destination, unwritable
from paceline.store.write.pipeline import PackedSamples, pack_resumable
from paceline.store.write.placement import ShardPlacement
from paceline.store.write.sources.archive_paths import find_archives
from paceline.store.write.sources.archives import Archives, OpenArchives
from paceline.store.write.sources.folder import Folder
from paceline.store.write.space import require_pack_space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.store.write.options import ShardLimits
    from paceline.store.write.sources.source import OpenSource, PackSource


def pack(
    source: PackSource,
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Pack `source` into the new folder `destination` and return a summary of the pack.

    If killed, there is either no `destination` and perhaps a ``destination.partial``, from which
    the next `pack` resumes, or the complete pack.

    Args:
        source: `Folder`, `Archives` or `Samples`.
        destination: a folder that does not exist yet, in a folder that does.
        options: shard size, codec, parity, and what to do about symbolic links.
        on_progress: called after each batch of samples.
        clock: the clock for `elapsed_s`; None = the system's.

    Raises:
        DestinationExists: `destination` exists; it is untouched.
        NotFound: the source, or the folder for `destination`, does not exist.
        UsageError: the source holds something that cannot be packed, or a name twice.
        StorageError: the disk is full, or too small from the start; the source cannot be read, or
            was changed while it was packed.
    """
    options = options or PackOptions()
    target = Path(destination).absolute()
    check_destination(source.root, target)
    check_codec(options)
    with source.open(symlinks=options.symlinks) as opened:
        return _pack(opened, destination, options, on_progress, clock or SystemClock())


def plan_pack(
    source: PackSource,
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
) -> PackSummary:
    """Return the summary that `pack` without a codec would return; write nothing.

    Raises the errors of `pack`, except for too little space (compare `pack_bytes`).
    """
    options = options or PackOptions()
    check_destination(source.root, Path(destination).absolute())
    check_codec(options)
    with source.open(symlinks=options.symlinks) as opened:
        return _plan(opened, destination, options)


def find_source(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Folder | Archives:
    """Return what `paths` name: archives, or one folder.

    Raises:
        NotFound: nothing matches a pattern.
        UsageError: several paths, and not all are archives.
    """
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if find_archives([os.fspath(path) for path in named]):
        return Archives(named)
    if len(named) != 1:
        raise UsageError(
            "several sources can be packed only if all are archives",
            where=", ".join(str(path) for path in named)[:500],
            fix="Give one folder, or .tar files",
        )
    return Folder(named[0])


def _pack(
    source: OpenSource,
    destination: str | os.PathLike[str],
    options: PackOptions,
    on_progress: Callable[[PackProgress], None] | None,
    clock: Clock,
) -> PackSummary:
    start_s = clock.now_s()
    target = Path(destination).absolute()
    limits = shard_limits(source.totals(), options)
    header = _journal_header(source, options, limits)
    partial = PartialPack(target)
    # The source translates its own errors: any other OSError concerns the target.
    with (
        os_errors_as(lambda problem: unwritable(target, problem, kept=partial.resumable)),
        partial,
    ):
        can_resume = source.resume_key and not options.restart
        entries = read_journal(partial.folder, header) if can_resume else []
        require_pack_space(
            target,
            source.totals(),
            options,
            beside_bytes=0,
            reused_bytes=sum(shard.length for entry in entries for shard in entry.shards),
            planned_bytes=(
                (lambda: _plan(source, destination, options).pack_bytes)
                if source.resume_key
                else None
            ),
        )
        encoder = SampleEncoder(options, partial)
        packed = pack_resumable(
            source,
            partial,
            encoder,
            limits,
            header=header,
            entries=entries,
            on_progress=on_progress,
        )
        metadata = _metadata(packed, source, partial, options.parity_group, encoder.dictionary)
        sorted_runs = [
            open_sorted_run(partial.folder / name, source.classes().label_map)
            for name in packed.sorted_runs
        ]
        index_length = write_index(partial, INDEX_NAME, sorted_runs, metadata)
        stored_bytes = dictionary_bytes = 0
        for sorted_run in sorted_runs:
            stored_bytes += int(sorted_run.extents.stored_lengths.sum())
            if needs_dictionary(sorted_run):
                dictionary_bytes = len(encoder.dictionary)
            sorted_run.release()
        sorted_runs.clear()
        partial.commit()
    return PackSummary(
        source=source.where,
        destination=str(destination),
        sample_count=packed.sample_count,
        folder_count=len(metadata.folders),
        class_count=len(metadata.classes),
        shard_count=len(metadata.shard_lengths),
        sample_bytes=packed.byte_count,
        stored_bytes=stored_bytes,
        pack_bytes=index_length + sum(metadata.shard_lengths) + sum(metadata.parity_lengths),
        opens_before=packed.sample_count,
        opens_after=len(metadata.shard_lengths) + 1,
        reused_sample_count=packed.reused_sample_count,
        elapsed_s=clock.now_s() - start_s,
        dictionary_bytes=dictionary_bytes,
        choice=encoder.choice,
    )


def _plan(
    source: OpenSource, destination: str | os.PathLike[str], options: PackOptions
) -> PackSummary:
    limits = shard_limits(source.totals(), options)
    placement, layout = ShardPlacement(limits), IndexLayout()
    byte_count = 0
    for batch in source.batches(limits.large_bytes):
        layout.sample_count += len(batch)
        layout.name_bytes += len(batch.samples.names)
        layout.ranges[Section.MODES].add(batch.samples.modes)
        layout.ranges[Section.MTIMES].add(batch.samples.mtimes_ns)
        byte_count += int(batch.lengths.sum())
        for offsets, lengths in placement.plan(batch.lengths, aligned_begins(batch.lengths)):
            layout.extent_count += len(lengths)
            layout.note_offsets(offsets)
            layout.ranges[Section.LENGTHS].add(lengths)
    placement.close()
    sample_count = layout.sample_count
    layout.is_chunked = layout.extent_count != sample_count
    shard_lengths, size = placement.closed, options.parity_group
    shard_groups = groups(len(shard_lengths), size) if size else []
    metadata = IndexMetadata(
        folders=source.folders(),
        classes=source.classes().names,
        shard_lengths=shard_lengths,
        shard_digests=[],
        parity_group=size,
        parity_lengths=[
            parity_length(shard_lengths[group.start : group.stop]) for group in shard_groups
        ],
    )
    index_length = planned_bytes(layout, metadata)
    return PackSummary(
        source=source.where,
        destination=str(destination),
        sample_count=sample_count,
        folder_count=len(metadata.folders),
        class_count=len(metadata.classes),
        shard_count=len(shard_lengths),
        sample_bytes=byte_count,
        stored_bytes=byte_count,
        pack_bytes=index_length + sum(shard_lengths) + sum(metadata.parity_lengths),
        opens_before=sample_count,
        opens_after=len(shard_lengths) + 1,
    )


def _metadata(
    packed: PackedSamples,
    source: OpenSource,
    folder: PartialPack,
    parity_group: int,
    dictionary: bytes,
) -> IndexMetadata:
    """Write the parity, if any; return what the index says of shards and folders."""
    parity = write_all_parity(folder, len(packed.shards), parity_group) if parity_group else []
    return IndexMetadata(
        folders=source.folders(),
        classes=source.classes().names,
        shard_lengths=[shard.length for shard in packed.shards],
        shard_digests=[shard.digest for shard in packed.shards],
        parity_group=parity_group,
        parity_lengths=[file.length for file in parity],
        parity_digests=[file.digest for file in parity],
        dictionary=dictionary,
        holders=source.holders if isinstance(source, OpenArchives) else None,
    )


def _journal_header(
    source: OpenSource, options: PackOptions, limits: ShardLimits
) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "source": source.resume_key,
        "options": {
            "shard_bytes": limits.shard_bytes,
            "growth_shards": limits.growth_shards,
            "codec": options.codec,
            "codec_level": options.codec_level,
            "shuffle": options.shuffle,
            "symlinks": options.symlinks,
        },
    }
