"""Packs a folder of samples: the first arc of the data path, run once before any training.

Bodies stream through one buffer, so memory is bounded by names and sizes (about a hundred bytes a
file), whatever the files weigh. What is written where: `store/format.py`; how a crash is survived:
`store/partial.py`.
"""

from __future__ import annotations

import errno
import os
import stat
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import ConfigError, PacelineError, StorageError
from paceline.core.record import Record
from paceline.native import crc32c
from paceline.store.format import (
    ALIGNMENT,
    INDEX_NAME,
    Index,
    padding,
    shard_header,
    shard_name,
    write_index,
)
from paceline.store.partial import PackFile, PartialPack, check_destination, unwritable
from paceline.store.scan import Source, scan, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions(Record):
    """How to pack.

    Changes the pack's files:
        shard_bytes: a shard is closed before it would grow beyond this; a larger sample gets a
            shard of its own.
    Changes which samples there are:
        follow_symlinks: pack what symbolic links lead to, instead of refusing them.
    """

    shard_bytes: int = 256 << 20
    follow_symlinks: bool = False

    def __post_init__(self) -> None:
        if self.shard_bytes < 2 * ALIGNMENT:
            raise ConfigError(
                f"a shard of {self.shard_bytes} bytes holds no sample",
                where="shard_bytes",
                fix=f"Use at least {2 * ALIGNMENT}; hundreds of MiB serve best",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary(Record):
    """What was packed, or would be; `elapsed_s` is 0 for a dry run."""

    source: str
    destination: str
    sample_count: int
    folder_count: int
    class_count: int
    shard_count: int
    sample_bytes: int
    pack_bytes: int
    elapsed_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackProgress:
    """How far packing has come."""

    sample_count: int
    sample_total: int
    byte_count: int
    byte_total: int


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
    ``destination.partial`` that the next run replaces, or the whole pack.

    Args:
        source: a folder; only files and folders may lie in it.
        destination: does not exist yet, though its parent does.
        options: shard size and what to do about symbolic links.
        on_progress: called after each sample.
        clock: in place of the system's.

    Raises:
        DestinationExists: nothing was touched.
        NotFound: `source`, or the folder for `destination`, does not exist.
        UsageError: something below `source` is neither file nor folder.
        StorageError: the disk is full, or a source file cannot be read or changed meanwhile.
    """
    options = options or PackOptions()
    clock = clock or SystemClock()
    start_s = clock.now_s()
    target = Path(destination).absolute()
    check_destination(Path(source), target)
    found = scan(os.fsencode(source), follow_symlinks=options.follow_symlinks)
    byte_total = sum(found.lengths)
    try:
        with PartialPack(target) as partial:
            writer = _ShardWriter(found, partial, options)
            byte_count = 0
            for sample in range(len(found)):
                byte_count += writer.add(sample)
                if on_progress is not None:
                    on_progress(
                        PackProgress(
                            sample_count=sample + 1,
                            sample_total=len(found),
                            byte_count=byte_count,
                            byte_total=byte_total,
                        )
                    )
            writer.finish()
            index_bytes = _write_index(partial, writer, found)
            partial.commit()
    except PacelineError:
        raise
    except OSError as problem:  # of the source, `add` has translated its own
        raise unwritable(target, problem) from problem
    return PackSummary(
        source=str(source),
        destination=str(destination),
        sample_count=len(found),
        folder_count=len(found.folders),
        class_count=len(found.classes),
        shard_count=len(writer.shard_lengths),
        sample_bytes=byte_count,
        pack_bytes=index_bytes + sum(writer.shard_lengths),
        elapsed_s=clock.now_s() - start_s,
    )


def plan_pack(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
) -> PackSummary:
    """Return what `pack_folder` would do, having written nothing; errors as there."""
    options = options or PackOptions()
    check_destination(Path(source), Path(destination).absolute())
    found = scan(os.fsencode(source), follow_symlinks=options.follow_symlinks)
    shard_lengths: list[int] = []
    for length in found.lengths:
        if not shard_lengths or _is_full(shard_lengths[-1], length, options):
            shard_lengths.append(ALIGNMENT)
        shard_lengths[-1] += length + padding(length)
    index = _index(found, _ShardTable(len(found)), shard_lengths)
    index_bytes = 0

    def count(data: bytes | memoryview) -> None:
        nonlocal index_bytes
        index_bytes += len(data)

    write_index(index, count)
    return PackSummary(
        source=str(source),
        destination=str(destination),
        sample_count=len(found),
        folder_count=len(found.folders),
        class_count=len(found.classes),
        shard_count=len(shard_lengths),
        sample_bytes=sum(found.lengths),
        pack_bytes=index_bytes + sum(shard_lengths),
    )


class _ShardTable:
    """Where each sample lies, as the index wants it."""

    def __init__(self, sample_count: int) -> None:
        self.offsets = np.zeros(sample_count, np.uint64)
        self.lengths = np.zeros(sample_count, np.uint64)
        self.shards = np.zeros(sample_count, np.uint32)
        self.checksums = np.zeros(sample_count, np.uint32)
        self.modes = np.zeros(sample_count, np.uint32)
        self.mtimes_ns = np.zeros(sample_count, np.int64)


class _ShardWriter:
    """Appends samples to shards and notes where they are."""

    def __init__(self, source: Source, partial: PartialPack, options: PackOptions) -> None:
        self._source = source
        self._partial = partial
        self._options = options
        self._file: PackFile | None = None
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self.table = _ShardTable(len(source))
        self.shard_lengths = array("Q")

    def add(self, sample: int) -> int:
        """Copy the `sample`-th file of the source; return its length."""
        path = self._source.root + b"/" + self._source.name(sample)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if not self._options.follow_symlinks:
            flags |= os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags)
        except OSError as problem:
            if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise _changed(path, "it is gone") from None
            raise unreadable(path, problem) from problem
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise _changed(path, "it is no file any more")
            self._copy(descriptor, path, before, sample)
        finally:
            os.close(descriptor)
        return before.st_size

    def _copy(self, descriptor: int, path: bytes, before: os.stat_result, sample: int) -> None:
        table = self.table
        file = self._shard_for(before.st_size)
        table.shards[sample] = len(self.shard_lengths)
        table.offsets[sample] = file.length
        checksum = length = 0
        while True:
            try:
                count = os.readv(descriptor, [self._buffer])
            except OSError as problem:
                raise unreadable(path, problem) from problem
            if count == 0 or length > before.st_size:
                break
            piece = self._buffer[:count]
            checksum = crc32c(piece, checksum)
            file.write(piece)
            length += count
        after = os.fstat(descriptor)
        if length != before.st_size or after.st_size != before.st_size:
            raise _changed(
                path, f"it had {before.st_size} bytes, then {max(length, after.st_size)}"
            )
        if after.st_mtime_ns != before.st_mtime_ns:
            raise _changed(path, "it was written to")
        file.write(bytes(padding(length)))
        table.lengths[sample] = length
        table.checksums[sample] = checksum
        table.modes[sample] = before.st_mode
        table.mtimes_ns[sample] = before.st_mtime_ns

    def finish(self) -> None:
        """Make the last shard durable."""
        if self._file is not None:
            self._partial.close(self._file)
            self.shard_lengths.append(self._file.length)
            self._file = None

    def _shard_for(self, length: int) -> PackFile:
        """Return the shard that takes a sample of this length, a new one if need be."""
        if self._file is not None and _is_full(self._file.length, length, self._options):
            self.finish()
        if self._file is None:
            shard = len(self.shard_lengths)
            self._file = self._partial.create(shard_name(shard))
            self._file.write(shard_header(shard))
        return self._file


def _is_full(shard_bytes: int, length: int, options: PackOptions) -> bool:
    return shard_bytes > ALIGNMENT and shard_bytes + length > options.shard_bytes


def _write_index(partial: PartialPack, writer: _ShardWriter, source: Source) -> int:
    file = partial.create(INDEX_NAME)
    write_index(_index(source, writer.table, writer.shard_lengths), file.write)
    partial.close(file)
    return file.length


def _index(source: Source, table: _ShardTable, shard_lengths: array[int] | list[int]) -> Index:
    return Index(
        offsets=table.offsets,
        lengths=table.lengths,
        shards=table.shards,
        checksums=table.checksums,
        labels=np.array(source.labels, np.int32),
        modes=table.modes,
        mtimes_ns=table.mtimes_ns,
        name_offsets=np.array(source.name_offsets, np.uint64),
        names=source.names,
        folders=tuple(source.folders),
        classes=tuple(source.classes),
        shard_lengths=np.array(shard_lengths, np.uint64),
    )


def _changed(path: bytes, why: str) -> StorageError:
    return StorageError(
        "a source file changed while it was packed",
        where=os.fsdecode(path),
        why=why,
        fix="Pack again when nobody writes to the source",
    )
