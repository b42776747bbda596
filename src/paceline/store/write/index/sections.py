"""Writes the sections of an index, each from front to back, all side by side.

The sections are flat arrays, so that a reader can map them without decoding: all processes of a
node share the page cache, and opening needs no parsing. A sum for each 64 KiB lets a reader verify
a section where it touches it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import crc32c
from paceline.store.format.header import IndexCounts, SectionPlace, pack_head, sections_begin
from paceline.store.format.layout import (
    BLOCK_BYTES,
    COLUMN_TYPES,
    FORMAT_VERSION,
    PLAIN_VERSION,
    Section,
    padding,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.store.write.files import PackFile


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """How a column is stored that is narrower than its type.

    Attributes:
        width: bytes of an entry.
        is_constant: one entry stands for all.
    """

    width: int
    is_constant: bool = False

    def length(self, count: int) -> int:
        """Return the bytes of a column of `count` entries."""
        return self.width * (min(count, 1) if self.is_constant else count)


@dataclass(slots=True)
class _OpenSection:
    """Where a section lies, and what has been written of it."""

    offset: int
    length: int
    written: int = 0
    checksum: int = 0
    sums: list[int] = field(default_factory=list)  # of its blocks; the last may grow

    def add(self, data: memoryview) -> None:
        """Count `data`, which continues the section."""
        self.checksum = crc32c(data, self.checksum)
        begin = 0
        while begin < len(data):
            room = BLOCK_BYTES - (self.written + begin) % BLOCK_BYTES
            block = data[begin : begin + room]
            if room == BLOCK_BYTES:
                self.sums.append(crc32c(block))
            else:
                self.sums[-1] = crc32c(block, self.sums[-1])
            begin += len(block)
        self.written += len(data)


class IndexWriter:
    """Writes the sections of an index side by side, each from front to back.

    The length of every section is known before, but for the last one's, which may turn out longer.
    So columns of any size stream through: nothing is held but the sums of blocks.

    Args:
        file: the file for the index; it is new and empty, and is not closed.
        lengths: bytes of each section, in the order in which they lie in the file, without the
            section of sums.
        columns: how columns are stored that are narrower than their types. None: an index of
            version 2, which has no such columns and no sums.
    """

    def __init__(
        self,
        file: PackFile,
        lengths: Mapping[Section, int],
        columns: Mapping[Section, StoredColumn] | None = None,
    ) -> None:
        self._file = file
        self._columns = columns or {}
        self._has_sums = columns is not None
        self._places: dict[Section, _OpenSection] = {}
        self._end = sections_begin(len(lengths) + self._has_sums)
        for section, length in lengths.items():
            self._places[section] = _OpenSection(self._end, length)
            self._end += length + padding(length)

    def __contains__(self, section: Section) -> bool:
        """Return whether the index has this section."""
        return section in self._places

    def put(self, section: Section, content: NDArray[Any] | bytes) -> None:
        """Append `content` to a section."""
        place = self._places[section]
        stored = self._columns.get(section)
        if stored is not None and not isinstance(content, bytes):
            if stored.is_constant:
                content = content[: 0 if place.written else 1]
            content = content.astype(COLUMN_TYPES[section].at_width(stored.width))
        self._append(place, _raw(content))

    def offset(self, section: Section) -> int:
        """Return where in the file a section begins."""
        return self._places[section].offset

    def finish(self, counts: IndexCounts) -> int:
        """Write what stands before the sections; return the length of the index."""
        *before, last = self._places.values()
        assert all(place.written == place.length for place in before)
        assert last.written >= last.length
        last.length = last.written
        self._end = last.offset + last.length + padding(last.length)
        if self._has_sums:
            sums = np.array([crc for place in self._places.values() for crc in place.sums], "<u4")
            last = _OpenSection(self._end, sums.nbytes)
            self._append(last, _raw(sums))
            self._places[Section.BLOCK_SUMS] = last
            self._end += last.length + padding(last.length)
        places = {
            section: SectionPlace(
                offset=place.offset,
                length=place.length,
                checksum=place.checksum,
                width=self._columns[section].width if section in self._columns else 0,
            )
            for section, place in self._places.items()
        }
        self._pad(last.offset + last.length)
        version = FORMAT_VERSION if self._has_sums else PLAIN_VERSION
        self._file.write_at(memoryview(pack_head(counts, self._end, places, version)), 0)
        return self._end

    def _append(self, place: _OpenSection, data: memoryview) -> None:
        self._file.write_at(data, place.offset + place.written)
        place.add(data)

    def _pad(self, end: int) -> None:
        """Give the file its length; holes before it read as the zeros that they stand for."""
        if end < self._end:
            self._file.write_at(memoryview(bytes(self._end - end)), end)


def index_bytes(lengths: Mapping[Section, int], *, has_sums: bool) -> int:
    """Return the length of an index with sections of these lengths."""
    stored = list(lengths.values())
    if has_sums:
        stored.append(4 * sum(-(-length // BLOCK_BYTES) for length in stored))
    return sections_begin(len(stored)) + sum(length + padding(length) for length in stored)


def _raw(content: NDArray[Any] | bytes) -> memoryview:
    # Through uint8, because a memoryview of an empty array cannot be cast.
    if isinstance(content, bytes):
        return memoryview(content)
    return np.ascontiguousarray(content).view(np.uint8).data
