"""How a pack lies on disk: the writing half; `native/src/pack_reader.cpp` is the reading half.

::

    PACK/
    +-- index.pace         header | section table | sections: flat arrays, one entry a sample
    +-- shard-00000.pace   header | sample | padding to 64 | sample | ...
    +-- shard-00001.pace   ...

docs/reference/pack-format.md has every byte. Flat arrays, because a reader maps them as they lie:
the page cache is the memory that all processes of a node share, and opening costs no parsing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.native import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORMAT_VERSION = 1
ALIGNMENT = 64
INDEX_NAME = "index.pace"
PARTIAL_SUFFIX = ".partial"

_HEADER = struct.Struct("<8sIIQQQIIQI")
_SECTION = struct.Struct("<IIQQII")
_SHARD_HEADER = struct.Struct("<8sII44x")
_REQUIRED = 1
_BLOCK_BYTES = 1 << 20


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Everything that an index says; arrays have one entry a sample, in the order of names."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    shards: NDArray[np.uint32]
    checksums: NDArray[np.uint32]
    labels: NDArray[np.int32]
    modes: NDArray[np.uint32]
    mtimes_ns: NDArray[np.int64]
    name_offsets: NDArray[np.uint64]
    names: bytes | bytearray
    folders: tuple[bytes, ...]
    classes: tuple[bytes, ...]
    shard_lengths: NDArray[np.uint64]


def shard_name(shard: int) -> str:
    """Return the file name of a shard.

    >>> shard_name(7)
    'shard-00007.pace'
    """
    return f"shard-{shard:05d}.pace"


def shard_header(shard: int) -> bytes:
    """Return the first 64 bytes of a shard."""
    head = _SHARD_HEADER.pack(b"PACESHRD", FORMAT_VERSION, shard)
    return head + struct.pack("<I", crc32c(head))


def padding(length: int) -> int:
    """Return how many bytes bring `length` to the next multiple of 64.

    >>> padding(1), padding(64), padding(0)
    (63, 0, 0)
    """
    return -length % ALIGNMENT


def write_index(index: Index, write: Callable[[bytes | memoryview], Any]) -> None:
    """Hand the bytes of the index file to `write`, piece by piece and in order.

    Cost: memory for one piece (1 MiB) beyond `index`.
    """
    sections = _sections(index)
    table_bytes = len(sections) * _SECTION.size
    position = _HEADER.size + 4 + table_bytes
    position += padding(position)
    first = position
    table = b""
    for section, content in sections:
        table += _SECTION.pack(section, _REQUIRED, position, len(content), crc32c(content), 0)
        position += len(content) + padding(len(content))
    head = _HEADER.pack(
        b"PACEPACK",
        FORMAT_VERSION,
        len(sections),
        position,
        len(index.lengths),
        len(index.folders),
        len(index.shard_lengths),
        len(index.classes),
        0,
        crc32c(table),
    )
    start = head + struct.pack("<I", crc32c(head)) + table
    write(start + bytes(first - len(start)))
    for _, content in sections:
        for begin in range(0, len(content), _BLOCK_BYTES):
            write(content[begin : begin + _BLOCK_BYTES])
        write(bytes(padding(len(content))))


def joined(strings: Iterable[bytes]) -> tuple[NDArray[np.uint64], bytes]:
    """Return the offsets (one more than strings) and the concatenation that store `strings`."""
    strings = tuple(strings)
    offsets = np.zeros(len(strings) + 1, np.uint64)
    np.cumsum([len(one) for one in strings], out=offsets[1:], dtype=np.uint64)
    return offsets, b"".join(strings)


def _sections(index: Index) -> list[tuple[Section, memoryview]]:
    folder_offsets, folders = joined(index.folders)
    class_offsets, classes = joined(index.classes)
    return [
        (Section.OFFSETS, _raw(index.offsets, "<u8")),
        (Section.LENGTHS, _raw(index.lengths, "<u8")),
        (Section.SHARDS, _raw(index.shards, "<u4")),
        (Section.CHECKSUMS, _raw(index.checksums, "<u4")),
        (Section.LABELS, _raw(index.labels, "<i4")),
        (Section.MODES, _raw(index.modes, "<u4")),
        (Section.MTIMES, _raw(index.mtimes_ns, "<i8")),
        (Section.NAME_OFFSETS, _raw(index.name_offsets, "<u8")),
        (Section.NAMES, memoryview(index.names)),
        (Section.FOLDER_OFFSETS, _raw(folder_offsets, "<u8")),
        (Section.FOLDERS, memoryview(folders)),
        (Section.CLASS_OFFSETS, _raw(class_offsets, "<u8")),
        (Section.CLASSES, memoryview(classes)),
        (Section.SHARD_LENGTHS, _raw(index.shard_lengths, "<u8")),
    ]


def _raw(array: NDArray[Any], dtype: str) -> memoryview:
    # Through uint8, because a memoryview of an empty array cannot be cast.
    return np.ascontiguousarray(array, dtype).view(np.uint8).data
