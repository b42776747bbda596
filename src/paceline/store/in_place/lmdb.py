"""LMDB databases in place: each record of the main database is a sample, in the order of keys.

A key that is a relative path is the sample's name. If some key is none, or is the folder of
another, the names of all are their keys in hexadecimal digits: the order stays that of the keys.
LMDB compares integer keys, and reverse ones, from the last byte to the first, and so their digits
are written. `Pack.key` returns the key of a sample.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.files import Access
from paceline.native import LmdbBlock, LmdbRecords, lmdb_meta
from paceline.store.format.layout import SIDE_SUFFIX
from paceline.store.format.sources import KeyNames, SourceKind
from paceline.store.in_place.data import (
    extent_columns,
    sample_columns,
    sources_of,
)
from paceline.store.write.sources.source import FolderTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.store.format.sources import Sources
    from paceline.store.in_place.data import Block
    from paceline.store.write.sources.source import SourceClasses

LMDB_FILE = "data.mdb"
_MAGIC = 0xBEEFC0DE.to_bytes(4, "little")
_MAGIC_OFFSET = 16
_BLOCK_RECORDS = 1 << 19


def is_lmdb(path: Path) -> bool:
    """Return whether the file begins as an LMDB database does.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(_MAGIC_OFFSET + len(_MAGIC))[_MAGIC_OFFSET:] == _MAGIC


class LmdbData:
    """The main database of the LMDB file at `path`."""

    has_checksums = False

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        self.side_file = path.with_name(path.name + SIDE_SUFFIX)
        self._path = path
        self._tree = FolderTree()
        self._names = KeyNames.PLAIN
        self._only: tuple[KeyNames, LmdbBlock] | None = None  # all records, if they are few

    def sources(self, folder: Path) -> Sources:
        """Return what the file is now, and its last transaction."""
        meta = lmdb_meta(os.fsencode(self._path))
        return replace(
            sources_of(SourceKind.LMDB, [self._path], folder),
            transaction=meta.transaction,
            page_bytes=meta.page_bytes,
            last_page=meta.last_page,
            meta_checksum=meta.checksum,
        )

    def blocks(self) -> Iterator[Block]:
        """Yield all records."""
        mtime_ns = self._path.stat().st_mtime_ns
        self._only = None  # of a database that changed while it was indexed, they are stale
        self._names = self._choose_names()
        self._tree = FolderTree()
        for block in self._records(self._names):
            if not block.are_paths:
                raise UsageError(
                    "a key is too long to name a sample",
                    where=self.where,
                    why="a name has at most 4,095 bytes, and these keys are named by their digits",
                    fix="Pack the records under other names: paceline.store.Samples",
                )
            labels = None
            if block.has_folders:
                labels = np.fromiter(map(self._tree.label, _names_of(block)), np.int32)
            shards = np.zeros(len(block.offsets), np.uint32)
            yield (
                sample_columns(block.names, block.name_offsets, labels, mtime_ns),
                extent_columns(block.offsets, block.lengths, shards),
            )

    def as_read(self, sources: Sources) -> Sources:
        """Return `sources` with how keys became names."""
        return replace(sources, key_names=self._names)

    def access(self, folders: Sequence[bytes]) -> Access:
        """Return who may read all files."""
        del folders  # are in archives, or in names alone
        return Access.of([self._path])

    def folders(self) -> list[bytes]:
        """Return the folders of the names."""
        return self._tree.folders()

    def classes(self) -> SourceClasses:
        """Return the top-level folders."""
        return self._tree.classes()

    def _choose_names(self) -> KeyNames:
        """Return in which way every key can be a name, and no name is the folder of another."""
        if lmdb_meta(os.fsencode(self._path)).has_reversed_order:
            return KeyNames.REVERSED_HEX
        tree = FolderTree()
        for block in self._records(KeyNames.PLAIN):
            if not block.are_paths:
                return KeyNames.HEX
            if block.has_folders:
                for name in _names_of(block):
                    tree.label(name)
        folders = frozenset(tree.folders())
        if folders:
            for block in self._records(KeyNames.PLAIN):
                if not folders.isdisjoint(_names_of(block)):
                    return KeyNames.HEX
        return KeyNames.PLAIN

    def _records(self, names: KeyNames) -> Iterator[LmdbBlock]:
        if self._only is not None and self._only[0] is names:
            yield self._only[1]
            return
        records = LmdbRecords(os.fsencode(self._path), names)
        block = records.next(_BLOCK_RECORDS)
        if len(block.offsets) < _BLOCK_RECORDS:
            self._only = (names, block)
        while len(block.offsets):
            yield block
            block = records.next(_BLOCK_RECORDS)


def _names_of(block: LmdbBlock) -> list[bytes]:
    bounds = block.name_offsets.tolist()
    names = block.names
    return [names[begin:end] for begin, end in pairwise(bounds)]
