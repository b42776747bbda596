"""TFRecord files in place: record k, over all files in their order, is the sample of that number.

A TFRecord has a checksum of its data, a CRC-32C as ours: such samples are verified from the start.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import NotFound, UsageError
from paceline.core.files import Access
from paceline.native import TfRecords, crc32c
from paceline.store.format.sources import SourceKind
from paceline.store.in_place.data import (
    BLOCK_SAMPLES,
    extent_columns,
    sample_columns,
    sources_of,
    unreadable,
)
from paceline.store.write.sources.source import SourceClasses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline.store.format.sources import Sources
    from paceline.store.in_place.data import Block

_LOG = logging.getLogger(__name__)

_SUFFIX = re.compile(r"\.(tfrecords?|tfrec)(-\d+-of-\d+)?$")
_SHARD = re.compile(r"-\d+-of-\d+$")  # as TensorFlow Datasets and many scripts name theirs
_LENGTH_BYTES = 8
_COMPRESSED = re.compile(r"\.(tfrecords?|tfrec)(-\d+-of-\d+)?\.gz$")
_GZIP = b"\x1f\x8b"
_DIGITS = 10


def is_tfrecord(path: Path) -> bool:
    """Return whether a path is named like a TFRecord file, or like a shard and begins as one does.

    Raises:
        OSError: it cannot be read.
    """
    if _SUFFIX.search(path.name) or _COMPRESSED.search(path.name):
        return True
    if not _SHARD.search(path.name) or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_LENGTH_BYTES + 4)
    if not head:
        return True  # a shard without records, beside others
    crc = crc32c(head[:_LENGTH_BYTES])
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return head[_LENGTH_BYTES:] == masked.to_bytes(4, "little")


class TfRecordData:
    """The records of TFRecord files.

    Args:
        paths: of the files.
        where: names them in messages.
        side_file: of their index.
        to_cut: a file that ends amid a record is read to the record before it.

    Raises:
        NotFound: there is no such file.
        UsageError: a file is compressed.
        StorageError: a file cannot be read.
    """

    has_checksums = True

    def __init__(
        self, paths: Sequence[Path], where: str, side_file: Path, *, to_cut: bool = False
    ) -> None:
        self._to_cut = to_cut
        self._cut_files = 0
        self.where = where
        self.side_file = side_file
        self._paths = list(paths)
        for path in self._paths:
            try:
                with path.open("rb") as file:
                    start = file.read(len(_GZIP))
            except FileNotFoundError:
                raise NotFound("no such file", where=str(path), fix="Check the path") from None
            except OSError as problem:
                raise unreadable(path, problem) from problem
            if start == _GZIP:
                raise UsageError(
                    "a compressed TFRecord file cannot be read in place",
                    where=str(path),
                    why="where a record begins is known only when all before it is decompressed",
                    fix=f"Decompress it: gunzip {path}",
                )

    def sources(self, folder: Path) -> Sources:
        """Return what the files are now."""
        sources = sources_of(SourceKind.TFRECORD, self._paths, folder)
        return replace(sources, cut_files=len(self._paths) if self._to_cut else 0)

    def blocks(self) -> Iterator[Block]:
        """Yield all records."""
        number = self._cut_files = 0
        for shard, path in enumerate(self._paths):
            status = path.stat()
            if not status.st_size:
                continue  # a file without records
            records = TfRecords(os.fsencode(path), self._to_cut)
            while len((block := records.next(BLOCK_SAMPLES)).offsets):
                count = len(block.offsets)
                names, offsets = numbered_names(number, count)
                number += count
                yield (
                    sample_columns(names, offsets, mtime_ns=status.st_mtime_ns),
                    extent_columns(
                        block.offsets,
                        block.lengths,
                        np.full(count, shard, np.uint32),
                        block.checksums,
                    ),
                )
            if records.cut_bytes:
                self._cut_files += 1
                _LOG.warning(
                    "%s ends amid a record: its last %s bytes are left out",
                    path,
                    f"{records.cut_bytes:,}",
                )

    def as_read(self, sources: Sources) -> Sources:
        """Return `sources` with how many files end amid a record."""
        return replace(sources, cut_files=self._cut_files)

    def access(self, folders: Sequence[bytes]) -> Access:
        """Return who may read all files."""
        del folders  # are in archives, or in names alone
        return Access.of(self._paths)

    def folders(self) -> list[bytes]:
        """Return no folders."""
        return []

    def classes(self) -> SourceClasses:
        """Return no classes."""
        return SourceClasses([], None)


def numbered_names(first: int, count: int) -> tuple[bytes, NDArray[np.uint64]]:
    """Return running numbers as names, and where each begins.

    >>> numbered_names(9, 2)[0]
    b'00000000090000000010'
    """
    numbers = np.arange(first, first + count, dtype=np.int64)[:, None]
    places = 10 ** np.arange(_DIGITS - 1, -1, -1, dtype=np.int64)
    digits = (numbers // places % 10 + ord("0")).astype(np.uint8)
    return digits.tobytes(), np.arange(count + 1, dtype=np.uint64) * np.uint64(_DIGITS)
