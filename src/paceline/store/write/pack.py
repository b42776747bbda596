"""Packs a source of samples: the first arc of the data path, run once before any training.

Bodies stream through a few buffers and columns through files (`write/sorted_runs.py`), so memory is
bounded whatever the source holds. What is written where: `format/layout.py`; how a crash is
survived: `write/partial.py` and `write/journal.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import PacelineError, UsageError
from paceline.store.format.layout import FORMAT_VERSION, INDEX_NAME, parity_name
from paceline.store.write.archives import ArchiveSource, find_archives
from paceline.store.write.folder import FolderSource
from paceline.store.write.index import Content, Shape, build_index, section_lengths, shape_of
from paceline.store.write.journal import read_journal
from paceline.store.write.options import (
    PackOptions,
    PackProgress,
    PackSummary,
    check_codec,
    shard_limits,
)
from paceline.store.write.parity import groups, parity_length, write_parity
from paceline.store.write.partial import PartialPack, check_destination, unwritable
from paceline.store.write.pipeline import Packer, large_bytes
from paceline.store.write.sections import index_bytes
from paceline.store.write.shards import Layout
from paceline.store.write.sorted_runs import open_run
from paceline.store.write.sources import SampleSource, aligned_begins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline.store.write.partial import PackFolder
    from paceline.store.write.shards import ShardLimits
    from paceline.store.write.sorted_runs import Run
    from paceline.store.write.sources import Source


def pack_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Pack the folder `source` into the new folder `destination` and return what it holds.

    Samples are all files in bytewise order of their relative paths; the top-level folders are the
    classes, and a file at the root has label -1. Killed at any moment, this leaves nothing, a
    ``destination.partial`` that the next run goes on from, or the whole pack.

    Args:
        source: a folder; only files and folders may lie in it.
        destination: does not exist yet, though its parent does.
        options: shard size, codec, and what to do about symbolic links.
        on_progress: called after each batch of samples.
        clock: in place of the system's.

    Raises:
        DestinationExists: nothing was touched.
        NotFound: `source`, or the folder for `destination`, does not exist.
        UsageError: something below `source` is neither file nor folder.
        StorageError: the disk is full, or a source file cannot be read or changed meanwhile.
    """
    options = options or PackOptions()
    check_destination(Path(source), Path(destination).absolute())
    opened = FolderSource(os.fsencode(source), follow_symlinks=options.follow_symlinks)
    with closing(opened):
        return pack_source(
            opened, destination, options=options, on_progress=on_progress, clock=clock
        )


def pack_samples(
    samples: Iterable[tuple[str | bytes, bytes]],
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Pack pairs of a name and bytes, in any order, into the new folder `destination`.

    Names are relative paths; the top-level folders are the classes. The samples are read once and
    never held, however many there are.

    Raises:
        DestinationExists: nothing was touched.
        UsageError: a name is no relative path, or comes twice.
        StorageError: the disk is full.
    """
    check_destination(None, Path(destination).absolute())
    return pack_source(
        SampleSource(samples), destination, options=options, on_progress=on_progress, clock=clock
    )


def pack_archives(
    archives: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Pack the files in tar archives, or WebDataset shards, into the new folder `destination`.

    Args:
        archives: archives (.tar, .tar.gz, .tgz, .tar.bz2, .tar.xz), patterns of them with braces,
            or a folder that holds nothing else.
        destination: does not exist yet, though its parent does.
        options: shard size and codec.
        on_progress: called after each batch of samples.
        clock: in place of the system's.

    Raises:
        DestinationExists: nothing was touched.
        NotFound: there is no such archive.
        UsageError: a member is neither file nor folder, its name leads out, or it comes twice.
        StorageError: an archive is damaged, or the disk is full.
    """
    check_destination(None, Path(destination).absolute())
    paths = [archives] if isinstance(archives, str | os.PathLike) else list(archives)
    found = find_archives([os.fspath(path) for path in paths])
    if not found:
        raise UsageError(
            "these are no archives",
            where=", ".join(str(path) for path in paths)[:500],
            fix="Name .tar files, patterns of them, or a folder that holds nothing else",
        )
    return pack_source(
        ArchiveSource(found), destination, options=options, on_progress=on_progress, clock=clock
    )


@contextmanager
def opened_source(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Source,
    options: PackOptions,
) -> Iterator[Source]:
    """Yield what paths stand for, archives or one folder; a source is passed through."""
    if not isinstance(source, str | os.PathLike | Sequence):
        yield source
        return
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    archives = find_archives([os.fspath(path) for path in paths])
    if archives:
        yield ArchiveSource(archives)
        return
    if len(paths) != 1:
        raise UsageError(
            "several sources are packed only if all are archives",
            where=", ".join(str(path) for path in paths)[:500],
            fix="Name one folder, or .tar files",
        )
    folder = FolderSource(os.fsencode(paths[0]), follow_symlinks=options.follow_symlinks)
    with closing(folder):
        yield folder


def pack_source(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Pack any source; see `pack_folder`."""
    options = options or PackOptions()
    clock = clock or SystemClock()
    start_s = clock.now_s()
    target = Path(destination).absolute()
    check_codec(options)
    limits = shard_limits(source, options)
    header = _journal_header(source, options, limits)
    partial = PartialPack(target)
    try:
        with partial:
            left = read_journal(partial.folder, header) if source.kind else []
            if options.restart:
                left = []
            partial.resumable = bool(left)  # passing over it may take long, and be interrupted
            packer = Packer(source, partial, options, limits, on_progress)
            try:
                packer.pack_all(left, header)
            finally:
                packer.stop()
            content = _content(packer, source, partial, options.parity_group)
            label_map = source.classes()[1]
            runs = [open_run(partial.folder / name, label_map) for name, _ in packer.spool.files]
            index_length = write_index(partial, INDEX_NAME, runs, content)
            shape = shape_of(runs)
            stored_bytes = sum(int(run.extents.stored_lengths.sum()) for run in runs)
            del runs
            partial.commit()
    except PacelineError:
        raise
    except OSError as problem:  # of the source, sources have translated their own
        raise unwritable(target, problem, kept=partial.resumable) from problem
    return PackSummary(
        source=source.where,
        destination=str(destination),
        sample_count=shape.sample_count,
        folder_count=len(content.folders),
        class_count=len(content.classes),
        shard_count=len(content.shard_lengths),
        sample_bytes=packer.byte_count,
        stored_bytes=stored_bytes,
        pack_bytes=index_length + sum(content.shard_lengths) + sum(content.parity_lengths),
        opens_before=shape.sample_count,
        opens_after=len(content.shard_lengths) + 1,
        reused_sample_count=packer.reused_sample_count,
        elapsed_s=clock.now_s() - start_s,
    )


def pack_paths(
    sources: Sequence[str],
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Pack one folder, or archives: what `sources` name is found out; see `pack_folder`."""
    options = options or PackOptions()
    _check_paths(sources, destination)
    with opened_source(sources, options) as source:
        return pack_source(
            source, destination, options=options, on_progress=on_progress, clock=clock
        )


def plan_pack(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
) -> PackSummary:
    """Return what packing a folder or archives would do without a codec, having written nothing.

    Errors are those of `pack_folder` and `pack_archives`.
    """
    options = options or PackOptions()
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    _check_paths(paths, destination)
    with opened_source(paths, options) as opened:
        return plan_source(opened, destination, options=options)


def _check_paths(
    sources: Sequence[str | os.PathLike[str]], destination: str | os.PathLike[str]
) -> None:
    only = Path(sources[0]) if len(sources) == 1 else None
    check_destination(only, Path(destination).absolute())


def plan_source(
    source: Source, destination: str | os.PathLike[str], *, options: PackOptions
) -> PackSummary:
    """Return what `pack_source` would do without a codec, having written nothing."""
    check_codec(options)
    layout = Layout(shard_limits(source, options))
    sample_count = extent_count = name_bytes = byte_count = 0
    for batch in source.batches(large_bytes(layout)):
        sample_count += len(batch)
        name_bytes += len(batch.samples.names)
        byte_count += int(batch.lengths.sum())
        extent_count += layout.plan(batch.lengths, aligned_begins(batch.lengths))
    layout.close()
    content = Content(
        folders=source.folders(),
        classes=source.classes()[0],
        shard_lengths=layout.closed,
        shard_digests=[],
        parity_group=options.parity_group,
        parity_lengths=[
            parity_length([layout.closed[k] for k in shards])
            for shards in groups(len(layout.closed), options.parity_group or len(layout.closed) + 1)
            if options.parity_group
        ],
    )
    shape = Shape(
        sample_count=sample_count,
        extent_count=extent_count,
        name_bytes=name_bytes,
        is_encoded=False,
        is_chunked=extent_count != sample_count,
    )
    index_length = index_bytes(section_lengths(shape, content))
    return PackSummary(
        source=source.where,
        destination=str(destination),
        sample_count=sample_count,
        folder_count=len(content.folders),
        class_count=len(content.classes),
        shard_count=len(layout.closed),
        sample_bytes=byte_count,
        stored_bytes=byte_count,
        pack_bytes=index_length + sum(layout.closed) + sum(content.parity_lengths),
        opens_before=sample_count,
        opens_after=len(layout.closed) + 1,
    )


def write_index(folder: PackFolder, name: str, runs: list[Run], content: Content) -> int:
    """Write the index file of a pack and make it durable; return its length."""
    file = folder.create(name)
    helpers = []

    def create(helper: str) -> Any:
        helpers.append(folder.create(helper))
        return helpers[-1]

    build_index(runs, content, file, create)
    for helper in helpers:
        folder.discard(helper)
    folder.close(file)
    return file.length


def _content(packer: Packer, source: Source, folder: PackFolder, parity_group: int) -> Content:
    """Write the parity, if any; return what the index says of shards and folders."""
    parity = []
    if parity_group:
        for k, shards in enumerate(groups(len(packer.shards), parity_group)):
            parity.append(write_parity(folder, k, shards, parity_name(k)))
    return Content(
        folders=source.folders(),
        classes=source.classes()[0],
        shard_lengths=[one.length for one in packer.shards],
        shard_digests=[one.digest for one in packer.shards],
        parity_group=parity_group,
        parity_lengths=[one.length for one in parity],
        parity_digests=[one.digest for one in parity],
    )


def _journal_header(source: Source, options: PackOptions, limits: ShardLimits) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "source": source.kind,
        "options": {
            "shard_bytes": limits.shard_bytes,
            "growth_shards": limits.growth_shards,
            "codec": options.codec,
            "codec_level": options.codec_level,
            "follow_symlinks": options.follow_symlinks,
        },
    }
