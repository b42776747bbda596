"""How a pack lies on disk: the writing half; `native/src/pack_index.cpp` is the reading half.

::

    PACK/
    +-- index.pace         header | section table | sections: flat arrays, one entry a sample
    +-- shard-00000.pace   header | sample | padding to 64 | sample | ...
    +-- shard-00001.pace   ...
    +-- parity-00000.pace  header | exclusive or of a group of shards (if asked for)

docs/reference/pack-format.md has every byte. Flat arrays, because a reader maps them as they lie:
the page cache is the memory that all processes of a node share, and opening costs no parsing.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import PACK_FORMAT_VERSION, crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

FORMAT_VERSION = PACK_FORMAT_VERSION
ALIGNMENT = 64
HEADER_BYTES = 64
SECTION_BYTES = 32
DIGEST_BYTES = 32
INDEX_NAME = "index.pace"
PARTIAL_SUFFIX = ".partial"
NUMBERED = re.compile(r"(shard|parity)-(\d{5,})\.pace")
# What packing, appending and repair write before it counts: all that they may remove.
UNFINISHED = re.compile(r"((index|(shard|parity)-\d{5,})\.pace|[a-z]+(-\d+)?)\.partial")

_HEADER = struct.Struct("<8sIIQQQIIQI")
_SECTION = struct.Struct("<IIQQII")
_FILE_HEADER = struct.Struct("<8sII44x")
_REQUIRED = 1


class Section(IntEnum):
    """What each section holds; the numbers stand in the file."""

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


# What a reader may do without; whoever knows no other section can still read every sample.
OPTIONAL = frozenset(
    {
        Section.NAME_TABLE,
        Section.FOLDER_SAMPLES,
        Section.FOLDER_ENDS,
        Section.SHARD_DIGESTS,
        Section.PARITY,
        Section.PARITY_DIGESTS,
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


def shard_header(shard: int) -> bytes:
    """Return the first 64 bytes of a shard."""
    return _file_header(b"PACESHRD", shard)


def parity_header(group: int) -> bytes:
    """Return the first 64 bytes of a parity file."""
    return _file_header(b"PACEPRTY", group)


def _file_header(magic: bytes, number: int) -> bytes:
    head = _FILE_HEADER.pack(magic, FORMAT_VERSION, number)
    return head + struct.pack("<I", crc32c(head))


def padding(length: int) -> int:
    """Return how many bytes bring `length` to the next multiple of 64.

    >>> padding(1), padding(64), padding(0)
    (63, 0, 0)
    """
    return -length % ALIGNMENT


def joined(strings: Iterable[bytes]) -> tuple[NDArray[np.uint64], bytes]:
    """Return the offsets (one more than strings) and the concatenation that store `strings`."""
    strings = tuple(strings)
    offsets = np.zeros(len(strings) + 1, np.uint64)
    np.cumsum([len(one) for one in strings], out=offsets[1:], dtype=np.uint64)
    return offsets, b"".join(strings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What the header counts."""

    samples: int
    folders: int
    shards: int
    classes: int


@dataclass(slots=True)
class _Place:
    """Where a section lies, and what has been written of it."""

    offset: int
    length: int
    written: int = 0
    checksum: int = 0


class IndexWriter:
    """Writes the sections of an index side by side, each from front to back.

    The length of every section is known before, but for the last one's, which may turn out longer.
    So columns of any size stream through: nothing is held.

    Args:
        write_at: writes bytes to a position of the file.
        lengths: bytes of each section, in the order in which they lie in the file.
    """

    def __init__(
        self, write_at: Callable[[memoryview, int], Any], lengths: dict[Section, int]
    ) -> None:
        self._write_at = write_at
        self._places: dict[Section, _Place] = {}
        self._end = index_start(len(lengths))
        for section, length in lengths.items():
            self._places[section] = _Place(self._end, length)
            self._end += length + padding(length)

    def put(self, section: Section, content: NDArray[Any] | bytes) -> None:
        """Append `content` to a section."""
        data = _raw(content)
        place = self._places[section]
        self._write_at(data, place.offset + place.written)
        place.checksum = crc32c(data, place.checksum)
        place.written += len(data)

    def offset(self, section: Section) -> int:
        """Return where in the file a section begins."""
        return self._places[section].offset

    def finish(self, counts: Counts) -> int:
        """Write what stands before the sections; return the length of the whole index."""
        *before, last = self._places.values()
        assert all(place.written == place.length for place in before)
        assert last.written >= last.length
        self._end += last.written + padding(last.written) - last.length - padding(last.length)
        last.length = last.written
        table = b"".join(
            _SECTION.pack(
                section,
                0 if section in OPTIONAL else _REQUIRED,
                place.offset,
                place.length,
                place.checksum,
                0,
            )
            for section, place in self._places.items()
        )
        head = _HEADER.pack(
            b"PACEPACK",
            FORMAT_VERSION,
            len(self._places),
            self._end,
            counts.samples,
            counts.folders,
            counts.shards,
            counts.classes,
            0,
            crc32c(table),
        )
        self._pad(last.offset + last.length)
        self._write_at(memoryview(head + struct.pack("<I", crc32c(head)) + table), 0)
        return self._end

    def _pad(self, end: int) -> None:
        """Give the file its length; holes before it read as the zeros that they stand for."""
        if end < self._end:
            self._write_at(memoryview(bytes(self._end - end)), end)


def index_start(section_count: int) -> int:
    """Return where the first section begins."""
    start = HEADER_BYTES + section_count * SECTION_BYTES
    return start + padding(start)


def index_bytes(lengths: dict[Section, int]) -> int:
    """Return the length of an index with sections of these lengths."""
    return index_start(len(lengths)) + sum(one + padding(one) for one in lengths.values())


def _raw(content: NDArray[Any] | bytes) -> memoryview:
    # Through uint8, because a memoryview of an empty array cannot be cast.
    if isinstance(content, bytes):
        return memoryview(content)
    return np.ascontiguousarray(content).view(np.uint8).data
