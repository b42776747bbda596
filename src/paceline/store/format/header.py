"""The head of an index: header and section table, in the one place that packs and parses them.

::

    offset  0  "PACEPACK" | version | sections | index bytes | samples | folders | shards | classes
           56  checksum of the section table | checksum of the 60 bytes before
           64  section table: number | flags | offset | length | checksum, 32 bytes each

docs/reference/pack-format.md says what each field means. The reader in C++ has the same structures
in `pack_index.hpp`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.native import crc32c
from paceline.store.format.layout import FORMAT_VERSION, HEADER_BYTES, OPTIONAL, Section, padding

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
    """Where a section lies in the index, and the CRC-32C of its bytes."""

    offset: int
    length: int
    checksum: int = 0

    @property
    def end(self) -> int:
        """Return where the section ends."""
        return self.offset + self.length


def sections_begin(section_count: int) -> int:
    """Return where the first section of an index begins."""
    head_bytes = HEADER_BYTES + section_count * _SECTION.size
    return head_bytes + padding(head_bytes)


def pack_head(
    counts: IndexCounts, index_bytes: int, places: Mapping[Section, SectionPlace]
) -> bytes:
    """Return header and section table of an index of `index_bytes`."""
    table = b"".join(
        _SECTION.pack(
            section,
            0 if section in OPTIONAL else _REQUIRED,
            place.offset,
            place.length,
            place.checksum,
            0,
        )
        for section, place in places.items()
    )
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
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
    """Return where each section of a complete index lies; nothing is checked."""
    section_count = _HEADER.unpack_from(index)[2]
    places = {}
    for k in range(section_count):
        entry = _SECTION.unpack_from(index, HEADER_BYTES + k * _SECTION.size)
        number, _, offset, length, checksum, _ = entry
        places[number] = SectionPlace(offset=offset, length=length, checksum=checksum)
    return places


def head_bytes(index: bytes) -> int:
    """Return the length of header and section table."""
    return HEADER_BYTES + int(_HEADER.unpack_from(index)[2]) * _SECTION.size


def resealed(index: bytes) -> bytes:
    """Return an index of which the content was changed, with all its checksums valid again.

    For tests and fault campaigns: a reader then meets what no flipped bit can bring about.
    """
    content = bytearray(index)
    for k, place in enumerate(parse_sections(content).values()):
        checksum = crc32c(content[place.offset : place.end])
        _CHECKSUM.pack_into(content, HEADER_BYTES + k * _SECTION.size + 24, checksum)
    table = content[HEADER_BYTES : head_bytes(index)]
    _CHECKSUM.pack_into(content, _HEADER.size - _CHECKSUM.size, crc32c(table))
    _CHECKSUM.pack_into(content, _HEADER.size, crc32c(content[: _HEADER.size]))
    return bytes(content)
