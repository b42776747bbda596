"""The head of an index: header and section table, in the one place that packs and parses them.

::

    offset  0  "PACEPACK" | version | sections | index bytes | samples | folders | shards | classes
           56  checksum of the section table | checksum of the 60 bytes before
           64  section table: number | flags | offset | length | checksum | width, 32 bytes each

docs/reference/pack-format.md says what each field means. The reader in C++ has the same structures
in `pack_index.hpp`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.native import crc32c
from paceline.store.format.layout import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    HEADER_BYTES,
    OPTIONAL,
    Section,
    padding,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEADER = struct.Struct("<8sIIQQQIIQI")
_CHECKSUM = struct.Struct("<I")
_SECTION = struct.Struct("<IIQQII")
_MAGIC = b"PACEPACK"
_REQUIRED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexCounts:
    """What the header counts."""

    samples: int
    folders: int
    shards: int
    classes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionPlace:
    """Where a section lies in the index, and the CRC-32C of its bytes.

    `width` is the bytes of an entry if the section is a column that is narrower than its type.
    """

    offset: int
    length: int
    checksum: int = 0
    width: int = 0

    @property
    def end(self) -> int:
        """Return where the section ends."""
        return self.offset + self.length


def sections_begin(section_count: int) -> int:
    """Return where the first section of an index begins."""
    head_bytes = HEADER_BYTES + section_count * _SECTION.size
    return head_bytes + padding(head_bytes)


def pack_head(
    counts: IndexCounts,
    index_bytes: int,
    places: Mapping[Section, SectionPlace],
    version: int = FORMAT_VERSION,
) -> bytes:
    """Return header and section table of an index of `index_bytes`."""
    table = b"".join(
        _SECTION.pack(
            section,
            0 if section in OPTIONAL else _REQUIRED,
            place.offset,
            place.length,
            place.checksum,
            place.width,
        )
        for section, place in places.items()
    )
    header = _HEADER.pack(
        _MAGIC,
        version,
        len(places),
        index_bytes,
        counts.samples,
        counts.folders,
        counts.shards,
        counts.classes,
        0,
        crc32c(table),
    )
    return header + _CHECKSUM.pack(crc32c(header)) + table


def parse_sections(index: bytes | bytearray) -> dict[int, SectionPlace]:
    """Return where each section of an index lies, in the order of its table; nothing is checked.

    Args:
        index: the index, or at least its header and section table.
    """
    section_count = _HEADER.unpack_from(index)[2]
    places = {}
    for k in range(section_count):
        entry = _SECTION.unpack_from(index, HEADER_BYTES + k * _SECTION.size)
        number, _, offset, length, checksum, width = entry
        places[number] = SectionPlace(offset=offset, length=length, checksum=checksum, width=width)
    return places


def head_bytes(index: bytes) -> int:
    """Return the length of header and section table."""
    return HEADER_BYTES + int(_HEADER.unpack_from(index)[2]) * _SECTION.size


def block_checksums(section: bytes | bytearray) -> list[int]:
    """Return the CRC-32C of each started 64 KiB of a section."""
    return [crc32c(section[k : k + BLOCK_BYTES]) for k in range(0, len(section), BLOCK_BYTES)]


def resealed(index: bytes) -> bytes:
    """Return an index of which the content was changed, with all its checksums valid again.

    For tests and fault campaigns: a reader then meets what no flipped bit can bring about.
    """
    content = bytearray(index)
    places = parse_sections(content)
    if Section.BLOCK_SUMS in places:
        sums = b"".join(
            _CHECKSUM.pack(checksum)
            for number, place in places.items()
            if number != Section.BLOCK_SUMS
            for checksum in block_checksums(content[place.offset : place.end])
        )
        place = places[Section.BLOCK_SUMS]
        content[place.offset : place.end] = sums[: place.length].ljust(place.length, b"\0")
    for k, place in enumerate(places.values()):
        checksum = crc32c(content[place.offset : place.end])
        _CHECKSUM.pack_into(content, HEADER_BYTES + k * _SECTION.size + 24, checksum)
    table = content[HEADER_BYTES : head_bytes(index)]
    _CHECKSUM.pack_into(content, _HEADER.size - _CHECKSUM.size, crc32c(table))
    _CHECKSUM.pack_into(content, _HEADER.size, crc32c(content[: _HEADER.size]))
    return bytes(content)
