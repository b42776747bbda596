"""Packs a source of samples: the first arc of the data path, run once before any training.

Bodies stream through a few buffers and columns through files (`store/spool.py`), so memory is bounded
whatever the source holds. What is written where: `store/format.py`; how a crash is survived:
`store/partial.py` and `store/journal.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import ConfigError, Missing, PacelineError, UsageError
from paceline.core.record import Record
from paceline.native import crc32c, encode, zstd_available
from paceline.store.archives import ArchiveSource, find_archives
from paceline.store.format import (
    ALIGNMENT,
    FORMAT_VERSION,
    HEADER_BYTES,
    INDEX_NAME,
    index_bytes,
    padding,
    parity_name,
    shard_name,
)
from paceline.store.indexing import Content, Shape, build_index, section_lengths, shape_of
from paceline.store.journal import JOURNAL_NAME, Entry, Journal, ListingDigest, read_journal
from paceline.store.parity import groups, parity_length, write_parity
from paceline.store.partial import PartialPack, check_destination, unwritable
from paceline.store.scan import FolderSource
from paceline.store.sources import SampleSource, aligned_begins
from paceline.store.spool import Extents, Spool, open_run, part_of
from paceline.store.writing import BATCH_BYTES, Layout, Shard, ShardLimits, ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from paceline.store.partial import PackFolder
    from paceline.store.sources import Batch, Source
    from paceline.store.spool import Run

_log = logging.getLogger(__name__)

DEFAULT_SHARD_BYTES = 256 << 20
MAX_SHARD_BYTES = 16 << 30
_SHARDS = 256  # about so many at most, unless the size is given
_GROWTH_SHARDS = 64
_ENCODE_BYTES = 64 << 20  # larger samples are stored as they are
_CODECS = ("none", "zstd", "auto")
_AUTO_RATIO = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions(Record):
    """How to pack.

    Changes the pack's files:
        shard_bytes: a shard is closed before it would grow beyond this; a sample that is larger is
            stored in chunks. 0 = 256 MiB, or what keeps a large pack at about 256 shards.
        codec: `zstd` stores a sample encoded if that is smaller at all, `auto` if it saves at least
            a tenth, `none` never. Samples over 64 MiB are stored as they are.
        codec_level: of zstd, 1 to 19: the higher, the smaller and slower.
        parity_group: a parity file for so many shards: one lost shard of a group can be made again
            from the others. 0 = none.
    Changes which samples there are:
        follow_symlinks: pack what symbolic links lead to, instead of refusing them.
    Changes speed:
        restart: throw away what a killed packing left, instead of going on from it.
    """

    shard_bytes: int = 0
    codec: str = "none"
    codec_level: int = 3
    parity_group: int = 0
    follow_symlinks: bool = False
    restart: bool = False

    def __post_init__(self) -> None:
        if self.shard_bytes != 0 and self.shard_bytes < 2 * ALIGNMENT:
            raise ConfigError(
                f"a shard of {self.shard_bytes} bytes holds no sample",
                where="shard_bytes",
                fix=f"Use at least {2 * ALIGNMENT}; hundreds of MiB serve best",
            )
        if self.codec not in _CODECS:
            raise ConfigError(
                f"no codec is called {self.codec!a}",
                where="codec",
                fix="Use one of " + ", ".join(_CODECS),
            )
        if not 1 <= self.codec_level <= 19:
            raise ConfigError(
                f"zstd has no level {self.codec_level}", where="codec_level", fix="Use 1 to 19"
            )
        if self.parity_group < 0 or self.parity_group == 1:
            raise ConfigError(
                f"a parity file for {self.parity_group} shards",
                where="parity_group",
                why="of one shard it would be a copy",
                fix="Use 2 or more, or 0 for none; 8 costs an eighth of the space",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary(Record):
    """What was packed, or would be; `elapsed_s` is 0 for a dry run.

    `reused_sample_count` were packed by a run before that was killed. `opens_before` and
    `opens_after` are the files that an epoch opens.
    """

    source: str
    destination: str
    sample_count: int
    folder_count: int
    class_count: int
    shard_count: int
    sample_bytes: int
    stored_bytes: int
    pack_bytes: int
    opens_before: int
    opens_after: int
    reused_sample_count: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackProgress:
    """How far packing has come; a total of 0 is unknown."""

    sample_count: int
    sample_total: int
    byte_count: int
    byte_total: int
    reused_byte_count: int = 0


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
        archives: archives (.tar, .tar.gz, .tgz, .tar.bz2, .tar.xz), patterns of them with braces, or
            a folder that holds nothing else.
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
    try:
        with PartialPack(target) as partial:
            left = read_journal(partial.folder, header) if source.kind else []
            if options.restart:
                left = []
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


def shard_limits(source: Source, options: PackOptions) -> ShardLimits:
    """Return how large the shards of a pack of `source` get."""
    if options.shard_bytes:
        return ShardLimits(shard_bytes=options.shard_bytes)
    totals = source.totals()
    if not totals.is_exact:
        return ShardLimits(
            shard_bytes=DEFAULT_SHARD_BYTES,
            growth_shards=_GROWTH_SHARDS,
            max_bytes=MAX_SHARD_BYTES,
        )
    wanted = DEFAULT_SHARD_BYTES
    total = totals.byte_count + totals.sample_count * ALIGNMENT // 2
    while wanted * _SHARDS < total and wanted < MAX_SHARD_BYTES:
        wanted *= 2
    return ShardLimits(shard_bytes=wanted)


def large_bytes(layout: Layout) -> int:
    """Return from what length on a sample is read in pieces."""
    return min(BATCH_BYTES, layout.limit - HEADER_BYTES)


def check_codec(options: PackOptions) -> None:
    """Refuse a codec that this machine lacks."""
    if options.codec != "none" and not zstd_available():
        raise Missing(
            "zstd is not on this machine",
            where="libzstd.so.1",
            fix="Install your distribution's libzstd (libzstd1), or pack with --codec none",
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
        """Pack the whole source, going on from what is `left` as far as the source is the same."""
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

    def _pass_over(self, batches: Any, left: list[Entry]) -> Batch | None:
        """Take the samples that are packed already; return what is left of the batch they end in."""
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
            self._mark_resumable(bool(left))

    def _mark_resumable(self, is_resumable: bool) -> None:
        if is_resumable and isinstance(self._folder, PartialPack):
            self._folder.resumable = True

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
            buffer, places, stored, codecs = encode(
                buffer, begins[:-1], batch.lengths, level, ratio, threads
            )
            begins = np.append(places, np.uint64(len(buffer)))
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
            checksum = np.array([crc32c(buffer[:length])], np.uint32)
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
            self._mark_resumable(True)

        return note


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
