"""TFRecord files in place: record k, over all files in their order, is the sample of that number.

A TFRecord has a checksum of its data, a CRC-32C as ours: such samples are verified from the start.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import NotFound, UsageError
from paceline.native import TfRecords
from paceline.store.format.sources import KeyNames, SourceKind
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

_SUFFIX = re.compile(r"\.(tfrecords?|tfrec)(-\d+-of-\d+)?$")
_COMPRESSED = re.compile(r"\.(tfrecords?|tfrec)(-\d+-of-\d+)?\.gz$")
_GZIP = b"\x1f\x8b"
_DIGITS = 10


def is_tfrecord(path: str) -> bool:
    """Return whether a path is named like a TFRecord file."""
    return _SUFFIX.search(path) is not None or _COMPRESSED.search(path) is not None


class TfRecordData:
    """The records of TFRecord files.

    Raises:
        NotFound: there is no such file.
        UsageError: a file is compressed.
        StorageError: a file cannot be read.
    """

    has_checksums = True

    def __init__(self, paths: Sequence[Path], where: str, side_file: Path) -> None:
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
        return sources_of(SourceKind.TFRECORD, self._paths, folder)

    def blocks(self) -> Iterator[Block]:
        """Yield all records."""
        number = 0
        for shard, path in enumerate(self._paths):
            status = path.stat()
            if not status.st_size:
                continue  # a file without records
            records = TfRecords(os.fsencode(path))
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

    def key_names(self) -> KeyNames:
        """Return that names are names."""
        return KeyNames.PLAIN

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
