"""The index of a pack, as arrays: all Python code reads the index through `IndexFile`.

`native/src/pack_index.cpp` maps the file, checks it and parses it; here its sections get their
types. The arrays are views of the mapping, unless they are stored narrower than their type: nothing
else is copied, and sections that are not asked for are not read.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import CorruptPack, NotFound
from paceline.native import PackReader
from paceline.store.format.header import SectionPlace, parse_sections
from paceline.store.format.layout import (
    COLUMN_TYPES,
    DIGEST_BYTES,
    EXTENT_COLUMNS,
    INDEX_NAME,
    PARTIAL_SUFFIX,
    Section,
)
from paceline.store.format.sources import Sources, parse_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_IDENTITY_DIGITS = 32
_CONTENT_IN_PLACE = {
    *(Section.OFFSETS, Section.LENGTHS, Section.SHARDS, Section.SHARD_LENGTHS),
    *(Section.NAME_OFFSETS, Section.NAMES, Section.LABELS, Section.CLASSES),
}
_NARROW_VERSION = 3  # the first with columns that may be narrow


class IndexFile:
    """The index of a pack; columns have one entry per sample or one entry per extent.

    A column is verified, all of it, when it is first asked for.

    Args:
        reader: has mapped the index.
    """

    def __init__(self, reader: PackReader) -> None:
        self._reader = reader
        self._is_checked = False

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> IndexFile:
        """Map the index of the pack at `path`; its shards need not be there.

        Raises:
            NotFound: there is no pack.
            CorruptPack: the index is damaged, or the pack is unfinished.
            UsageError: a newer Paceline wrote it.
            StorageError: it cannot be read.
        """
        require_pack(Path(path))
        index = cls(PackReader(os.fsencode(path), index_only=True))
        index.check()
        return index

    def check(self) -> None:
        """Check the content of all columns, which a reader checks sample by sample.

        Code that uses whole columns calls this before.

        Raises:
            CorruptPack: the columns contradict each other, or the format.
        """
        if not self._is_checked:
            self._reader.check_content()
        self._is_checked = True

    @property
    def version(self) -> int:
        """Of the format."""
        return self._reader.version

    @cached_property
    def identity(self) -> str:
        """Content digest, the same for every copy of the pack.

        The first 32 hexadecimal digits of a SHA-256 over the index's header and section table. Of
        data in place: over names, labels, locations, and the sizes of the files (of LMDB, also its
        transaction), wherever they lie, and whether or not their checksums are known.
        """
        content = self._reader.head if self.sources is None else self._content_in_place()
        return hashlib.sha256(content).hexdigest()[:_IDENTITY_DIGITS]

    @cached_property
    def sources(self) -> Sources | None:
        """What the files of data in place were when they were indexed; None of a pack."""
        if not self._reader.is_in_place:
            return None
        files, sources = (
            self._reader.section(section).tobytes() for section in (Section.FILES, Section.SOURCES)
        )
        try:
            return parse_sources(files, sources)
        except ValueError as problem:
            raise CorruptPack(
                "the index is damaged", why=str(problem), fix="Delete it: it is then made again"
            ) from None

    @property
    def has_checksums(self) -> bool:
        """Whether the samples have checksums; those of data in place may have none yet."""
        return self._reader.has_checksums

    def shard_path(self, shard: int) -> Path:
        """Return the path of a shard's file."""
        return Path(os.fsdecode(self._reader.shard_path(shard)))

    # Columns of samples

    @property
    def sample_count(self) -> int:
        """How many samples there are."""
        return self._reader.sample_count

    @cached_property
    def name_offsets(self) -> NDArray[np.uint64]:
        """Where each name begins in `name_bytes`, and the end of the last, shape (n + 1,)."""
        return self._column(Section.NAME_OFFSETS)

    @cached_property
    def name_bytes(self) -> NDArray[np.uint8]:
        """The names of samples, end to end."""
        return self._reader.section(Section.NAMES)

    @cached_property
    def labels(self) -> NDArray[np.int32]:
        """The class of each sample; -1 = none."""
        return self._column(Section.LABELS)

    @cached_property
    def modes(self) -> NDArray[np.uint32]:
        """``st_mode`` of each sample's file."""
        return self._column(Section.MODES)

    @cached_property
    def mtimes_ns(self) -> NDArray[np.int64]:
        """When each sample's file was last written, since 1970."""
        return self._column(Section.MTIMES)

    @cached_property
    def first_extents(self) -> NDArray[np.uint64]:
        """The first extent of each sample, and the end; empty when sample k is extent k."""
        return self._column(Section.FIRST_EXTENTS)

    @property
    def sample_lengths(self) -> NDArray[np.uint64]:
        """Bytes of each sample; a view where every sample is one extent."""
        if not len(self.first_extents):
            return self.lengths
        self.check()
        ends = np.zeros(len(self.lengths) + 1, np.uint64)
        np.cumsum(self.lengths, out=ends[1:])
        return np.diff(ends[self.first_extents])

    @property
    def sample_shards(self) -> NDArray[np.uint32]:
        """The shard in which each sample begins."""
        if not len(self.first_extents):
            return self.shards
        self.check()
        last = max(len(self.shards) - 1, 0)
        return self.shards[np.minimum(self.first_extents[:-1], last)]

    # Columns of extents

    @property
    def extent_count(self) -> int:
        """How many extents there are."""
        return self._reader.extent_count

    @cached_property
    def offsets(self) -> NDArray[np.uint64]:
        """Where each extent begins in its shard."""
        return self._column(Section.OFFSETS)

    @cached_property
    def lengths(self) -> NDArray[np.uint64]:
        """Decoded bytes of each extent."""
        return self._column(Section.LENGTHS)

    @cached_property
    def stored_lengths(self) -> NDArray[np.uint64]:
        """Bytes of each extent as they are stored."""
        return self._column(Section.STORED_LENGTHS) if self._is_encoded else self.lengths

    @cached_property
    def shards(self) -> NDArray[np.uint32]:
        """The shard of each extent."""
        return self._column(Section.SHARDS)

    @cached_property
    def checksums(self) -> NDArray[np.uint32]:
        """CRC-32C of the decoded bytes of each extent; empty where there are none yet."""
        return self._column(Section.CHECKSUMS)

    @cached_property
    def codecs(self) -> NDArray[np.uint8]:
        """How each extent is compressed, as `native.encoding_of` reads it: 0 = not at all."""
        if self._is_encoded:
            return self._column(Section.CODECS)
        return np.broadcast_to(np.uint8(0), self.extent_count)

    @cached_property
    def dictionary(self) -> bytes:
        """What the extents of codec zstd-dict have in common; empty if the pack has none."""
        return self._reader.section(Section.DICTIONARY).tobytes()

    def decode(self, extent: int, stored: bytes) -> bytes | None:
        """Return the bytes that an encoded extent stands for; None if `stored` is damaged.

        Raises:
            Missing: this machine lacks the library of its codec.
        """
        return self._reader.decode(stored, int(self.codecs[extent]), int(self.lengths[extent]))

    # Folders, classes, files

    @property
    def folder_count(self) -> int:
        """How many folders there are."""
        return self._reader.folder_count

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return self._reader.class_count

    @property
    def folder_names(self) -> list[bytes]:
        """The relative paths of all folders, in the order of the file."""
        return self._strings(Section.FOLDER_OFFSETS, Section.FOLDERS)

    @property
    def class_names(self) -> list[bytes]:
        """The names of the classes, in the order of their labels."""
        return self._strings(Section.CLASS_OFFSETS, Section.CLASSES)

    @cached_property
    def shard_lengths(self) -> NDArray[np.uint64]:
        """Bytes of each shard file."""
        return self._column(Section.SHARD_LENGTHS)

    @cached_property
    def shard_digests(self) -> list[bytes]:
        """SHA-256 of each shard file; none in version 1."""
        return self._digests(Section.SHARD_DIGESTS)

    @cached_property
    def parity_group(self) -> int:
        """How many shards one parity file covers; 0 = there is no parity."""
        parity = self._column(Section.PARITY)
        return int(parity[0]) if len(parity) > 1 else 0

    @cached_property
    def parity_lengths(self) -> NDArray[np.uint64]:
        """Bytes of each parity file."""
        return self._column(Section.PARITY)[1:]

    @cached_property
    def parity_digests(self) -> list[bytes]:
        """SHA-256 of each parity file."""
        return self._digests(Section.PARITY_DIGESTS)

    def column(self, section: Section) -> NDArray[Any]:
        """Return a column as it is stored, without a copy: its type may be narrower.

        All its bytes are verified by this.
        """
        data = self._reader.section(section)
        kind = COLUMN_TYPES[section]
        place = self._places.get(section)
        width = place.width if place is not None and self.version >= _NARROW_VERSION else 0
        dtype = kind.at_width(width)
        values = data[: len(data) - len(data) % dtype.itemsize].view(dtype)
        if not width or not len(values):
            return values
        count = self.extent_count if section in EXTENT_COLUMNS else self.sample_count
        return values if len(values) == count else np.broadcast_to(values[0], count)

    # What follows from these

    def name(self, sample: int) -> bytes:
        """Return a sample's name."""
        return self._reader.name(sample)

    def sample_of(self, extent: int) -> int:
        """Return the sample that an extent belongs to."""
        if not len(self.first_extents):
            return extent
        return int(np.searchsorted(self.first_extents, extent, side="right")) - 1

    def position_in_sample(self, extent: int) -> int:
        """Return how many bytes of its sample lie before an extent."""
        if not len(self.first_extents):
            return 0
        first = int(self.first_extents[self.sample_of(extent)])
        return int(self.lengths[first:extent].sum())

    def extents_by_shard(self) -> Iterator[NDArray[np.int64]]:
        """Yield for each shard its extents in the order in which they lie, without empty ones."""
        order = np.lexsort((self.offsets, self.shards))
        order = order[self.stored_lengths[order] > 0]
        ends = np.searchsorted(self.shards[order], np.arange(len(self.shard_lengths)), side="right")
        first = 0
        for end in ends:
            yield order[first:end]
            first = int(end)

    def parity_group_of(self, shard: int) -> range:
        """Return the shards that share a parity file with `shard`."""
        size = self.parity_group
        first = shard // size * size
        return range(first, min(first + size, len(self.shard_lengths)))

    def evict(self) -> None:
        """Drop the pages that were read so far from this process."""
        self._reader.evict_index()

    @property
    def _is_encoded(self) -> bool:
        return Section.CODECS in self._places

    @cached_property
    def _places(self) -> dict[int, SectionPlace]:
        return parse_sections(self._reader.head)

    @property
    def stored_lengths_section(self) -> Section:
        """The section that holds `stored_lengths`."""
        return Section.STORED_LENGTHS if self._is_encoded else Section.LENGTHS

    def _column(self, section: Section) -> NDArray[Any]:
        """Return a column at full width: a view, unless it is stored narrower."""
        stored = self.column(section)
        dtype = COLUMN_TYPES[section].at_width(0)
        if stored.dtype == dtype:
            return stored
        if len(stored) and not any(stored.strides):
            return np.broadcast_to(stored[0].astype(dtype), len(stored))
        wide = stored.astype(dtype)
        wide.flags.writeable = False  # as a view is
        return wide

    def _content_in_place(self) -> bytes:
        assert self.sources is not None
        places = self._places
        sections = sorted(places.keys() & _CONTENT_IN_PLACE)
        digests = ((number, places[number].length, places[number].checksum) for number in sections)
        return repr((list(digests), self.sources.transaction)).encode()

    def _strings(self, offsets: Section, characters: Section) -> list[bytes]:
        bounds = self.column(offsets).tolist()
        data = self._reader.section(characters).tobytes()
        return [data[begin:end] for begin, end in pairwise(bounds)]

    def _digests(self, section: Section) -> list[bytes]:
        data = self._reader.section(section).tobytes()
        return [data[k : k + DIGEST_BYTES] for k in range(0, len(data), DIGEST_BYTES)]


def require_pack(path: Path) -> None:
    """Raise an error unless there is a pack at `path`.

    Raises:
        NotFound: there is nothing, or a folder without an index.
        CorruptPack: the pack is unfinished.
    """
    if path.resolve().name.endswith(PARTIAL_SUFFIX):
        raise CorruptPack(
            "the pack is unfinished",
            where=str(path),
            why="packing was killed, or is still running",
            fix="Run paceline pack again: it resumes or replaces the unfinished pack",
        )
    try:
        (path / INDEX_NAME).lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return  # opening it says what is wrong
    else:
        return
    why = "the folder has no index.pace" if path.is_dir() else ""
    fix = "Make one: paceline pack SRC DST"
    if path.with_name(path.name + PARTIAL_SUFFIX).is_dir() and not path.exists():
        why = f"{path.name}{PARTIAL_SUFFIX} beside it is an unfinished pack"
        fix = "Run paceline pack again: it resumes or replaces the unfinished one"
    raise NotFound("no pack here", where=str(path), why=why, fix=fix)
