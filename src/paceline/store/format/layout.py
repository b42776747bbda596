"""The layout of a pack on disk: names of files, headers, sections.

::

    PACK/
    +-- index.pace         header | section table | sections: flat arrays, one entry per sample
    +-- shard-00000.pace   header | sample | padding | sample | ...
    +-- shard-00001.pace   ...
    +-- parity-00000.pace  header | exclusive or of a group of shards (if asked for)

docs/reference/pack-format.md defines every byte. The arrays are flat, so that a reader can map them
without decoding: all processes of a node share the page cache, and opening needs no parsing.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import PACK_FORMAT_VERSION, crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

FORMAT_VERSION = PACK_FORMAT_VERSION  # of an index; the oldest that its content needs is written
PLAIN_VERSION = 2  # full columns, no sums of blocks, aligned samples
FILE_VERSION = 2  # of shards and parity files, whose headers have not changed since
ALIGNMENT = 64
_SMALL_ALIGNMENT = 8  # of samples that are smaller than ALIGNMENT
BLOCK_BYTES = 64 << 10  # of a section, under one checksum
HEADER_BYTES = 64  # of an index, a shard, a parity file
DIGEST_BYTES = 32
INDEX_NAME = "index.pace"
PARTIAL_SUFFIX = ".partial"
LOCK_SUFFIX = ".lock"
SIDE_SUFFIX = ".pace"  # of the index of data in place, after the name of the data
NUMBERED = re.compile(r"(shard|parity)-(\d{5,})\.pace")
# Temporary files of packing, appending and repair: the only files that they may remove.
UNFINISHED = re.compile(r"((index|(shard|parity)-\d{5,})\.pace|[a-z]+(-\d+)?)\.partial")
_BESIDE_SIDE_FILE = re.compile(r"\..+\.pace\.(lock|[^.]+\.partial/?)", re.DOTALL)

_FILE_HEADER = struct.Struct("<8sII44x")


class Section(IntEnum):
    """What each section holds; the numbers are those of the file."""

    OFFSETS = 1
    LENGTHS = 2
    SHARDS = 3
    CHECKSUMS = 4
    LABELS = 5
    MODES = 6
    MTIMES = 7
    NAME_OFFSETS = 8
    NAMES = 9
    FOLDER_OFFSETS = 10
    FOLDERS = 11
    CLASS_OFFSETS = 12
    CLASSES = 13
    SHARD_LENGTHS = 14
    STORED_LENGTHS = 15
    CODECS = 16
    FIRST_EXTENTS = 17
    NAME_TABLE = 18
    FOLDER_SAMPLES = 19
    FOLDER_ENDS = 20
    SHARD_DIGESTS = 21
    PARITY = 22
    PARITY_DIGESTS = 23
    FILES = 24
    SOURCES = 25
    BLOCK_SUMS = 26
    DICTIONARY = 27


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of the entries of a section.

    Attributes:
        dtype: NumPy's name of it, at full width.
        is_narrow: whether fewer bytes may hold an entry, or one entry stand for all (version 3).
    """

    dtype: str
    is_narrow: bool = False

    def at_width(self, width: int) -> np.dtype[Any]:
        """Return the type of entries of so many bytes; 0 = the full width."""
        return np.dtype(f"<{self.dtype[1]}{width}") if width else np.dtype(self.dtype)


COLUMN_TYPES = {
    Section.OFFSETS: ColumnType("<u8", is_narrow=True),
    Section.LENGTHS: ColumnType("<u8", is_narrow=True),
    Section.SHARDS: ColumnType("<u4", is_narrow=True),
    Section.CHECKSUMS: ColumnType("<u4"),
    Section.LABELS: ColumnType("<i4", is_narrow=True),
    Section.MODES: ColumnType("<u4", is_narrow=True),
    Section.MTIMES: ColumnType("<i8", is_narrow=True),
    Section.NAME_OFFSETS: ColumnType("<u8"),
    Section.FOLDER_OFFSETS: ColumnType("<u8"),
    Section.CLASS_OFFSETS: ColumnType("<u8"),
    Section.SHARD_LENGTHS: ColumnType("<u8"),
    Section.STORED_LENGTHS: ColumnType("<u8", is_narrow=True),
    Section.CODECS: ColumnType("|u1", is_narrow=True),
    Section.FIRST_EXTENTS: ColumnType("<u8"),
    Section.PARITY: ColumnType("<u8"),
}
# The columns with an entry for each extent; the other narrow ones have one for each sample.
EXTENT_COLUMNS = frozenset(
    {
        Section.OFFSETS,
        Section.LENGTHS,
        Section.SHARDS,
        Section.STORED_LENGTHS,
        Section.CODECS,
    }
)

# A reader that does not know these sections can still read every sample.
OPTIONAL = frozenset(
    {
        Section.NAME_TABLE,
        Section.FOLDER_SAMPLES,
        Section.FOLDER_ENDS,
        Section.SHARD_DIGESTS,
        Section.PARITY,
        Section.PARITY_DIGESTS,
        Section.BLOCK_SUMS,
    }
)


def shard_name(shard: int) -> str:
    """Return the file name of a shard.

    >>> shard_name(7)
    'shard-00007.pace'
    """
    return f"shard-{shard:05d}.pace"


def parity_name(group: int) -> str:
    """Return the file name of a group's parity.

    >>> parity_name(7)
    'parity-00007.pace'
    """
    return f"parity-{group:05d}.pace"


def is_of_side_file(name: str) -> bool:
    """Return whether a name is that of an index of data in place, or of what is there to make one.

    >>> [is_of_side_file(name) for name in ("x.tar.pace", ".x.tar.pace.lock", "index.pace", "x")]
    [True, True, False, False]
    """
    is_of_pack = name == INDEX_NAME or NUMBERED.fullmatch(name) is not None
    if name.endswith(SIDE_SUFFIX):
        return not is_of_pack
    return _BESIDE_SIDE_FILE.fullmatch(name) is not None


class FileMagic(bytes, Enum):
    """The first bytes of the files other than the index."""

    SHARD = b"PACESHRD"
    PARITY = b"PACEPRTY"


def file_header(magic: FileMagic, number: int, version: int = FILE_VERSION) -> bytes:
    """Return the first 64 bytes of the shard or parity file of that number."""
    head = _FILE_HEADER.pack(magic.value, version, number)
    return head + struct.pack("<I", crc32c(head))


def is_file_header(head: bytes, magic: FileMagic, number: int) -> bool:
    """Return whether `head` is the header of that file, in any version."""
    if len(head) != HEADER_BYTES or struct.unpack("<I", head[60:])[0] != crc32c(head[:60]):
        return False
    found, _, found_number = _FILE_HEADER.unpack(head[:60])
    return bool(found == magic.value and found_number == number)


def padding(length: int) -> int:
    """Return how many bytes bring `length` to the next multiple of 64.

    >>> padding(1), padding(64), padding(0)
    (63, 0, 0)
    """
    return -length % ALIGNMENT


def aligned_begins(lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the offset of each sample when samples are stored one after the other, and the end.

    Samples smaller than 64 bytes begin at multiples of 8, others and the end at multiples of 64.

    >>> aligned_begins(np.array([5, 20, 64, 3, 100], np.uint64)).tolist()
    [0, 8, 64, 128, 192, 320]
    """
    step = np.uint64(_SMALL_ALIGNMENT)
    begins = np.zeros(len(lengths) + 1, np.uint64)
    np.cumsum((lengths + step - np.uint64(1)) // step * step, out=begins[1:])
    # Each large sample, and the end, moves to the next multiple of 64, with all that follows.
    aligned = np.append(np.flatnonzero(lengths >= ALIGNMENT), len(lengths))
    gaps = np.zeros(len(begins), np.uint64)
    gaps[aligned] = -np.diff(begins[aligned], prepend=np.uint64(0)) % np.uint64(ALIGNMENT)
    return begins + np.cumsum(gaps, dtype=np.uint64)


def joined(strings: Iterable[bytes]) -> tuple[NDArray[np.uint64], bytes]:
    """Return the offsets (one more than strings) and the concatenation that store `strings`."""
    strings = tuple(strings)
    offsets = np.zeros(len(strings) + 1, np.uint64)
    np.cumsum([len(string) for string in strings], out=offsets[1:], dtype=np.uint64)
    return offsets, b"".join(strings)
