"""Writes the sections of an index, each from front to back, all side by side.

The sections are flat arrays, so that a reader can map them without decoding: all processes of a
node share the page cache, and opening needs no parsing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import crc32c
from paceline.store.format.header import IndexCounts, SectionPlace, pack_head, sections_begin
from paceline.store.format.layout import Section, padding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.store.write.files import PackFile


@dataclass(slots=True)
class _OpenSection:
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
        file: the file for the index; it is new and empty, and is not closed.
        lengths: bytes of each section, in the order in which they lie in the file.
    """

    def __init__(self, file: PackFile, lengths: dict[Section, int]) -> None:
        self._file = file
        self._places: dict[Section, _OpenSection] = {}
        self._end = sections_begin(len(lengths))
        for section, length in lengths.items():
            self._places[section] = _OpenSection(self._end, length)
            self._end += length + padding(length)

    def __contains__(self, section: Section) -> bool:
        """Return whether the index has this section."""
        return section in self._places

    def put(self, section: Section, content: NDArray[Any] | bytes) -> None:
        """Append `content` to a section."""
        data = _raw(content)
        place = self._places[section]
        self._file.write_at(data, place.offset + place.written)
        place.checksum = crc32c(data, place.checksum)
        place.written += len(data)

    def offset(self, section: Section) -> int:
        """Return where in the file a section begins."""
        return self._places[section].offset

    def finish(self, counts: IndexCounts) -> int:
        """Write what stands before the sections; return the length of the index."""
        *before, last = self._places.values()
        assert all(place.written == place.length for place in before)
        assert last.written >= last.length
        self._end += last.written + padding(last.written) - last.length - padding(last.length)
        last.length = last.written
        places = {
            section: SectionPlace(offset=place.offset, length=place.length, checksum=place.checksum)
            for section, place in self._places.items()
        }
        self._pad(last.offset + last.length)
        self._file.write_at(memoryview(pack_head(counts, self._end, places)), 0)
        return self._end

    def _pad(self, end: int) -> None:
        """Give the file its length; holes before it read as the zeros that they stand for."""
        if end < self._end:
            self._file.write_at(memoryview(bytes(self._end - end)), end)


def index_bytes(lengths: dict[Section, int]) -> int:
    """Return the length of an index with sections of these lengths."""
    return sections_begin(len(lengths)) + sum(
        length + padding(length) for length in lengths.values()
    )


def _raw(content: NDArray[Any] | bytes) -> memoryview:
    # Through uint8, because a memoryview of an empty array cannot be cast.
    if isinstance(content, bytes):
        return memoryview(content)
    return np.ascontiguousarray(content).view(np.uint8).data
