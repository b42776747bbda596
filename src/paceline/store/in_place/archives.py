"""Tar archives in place, and WebDataset shards, which are tar archives too.

The members are those that packing finds (`store.Archives`), with the same names and classes; a hard
link is the bytes of the file that it leads to. An archive that is compressed is refused: where a
member begins is known only when all before it is decompressed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.files import Access
from paceline.store.format.sources import SourceKind
from paceline.store.in_place.data import BLOCK_SAMPLES, extent_columns, sources_of
from paceline.store.write.columns import SampleColumns
from paceline.store.write.sources.archives import OpenArchives
from paceline.store.write.sources.tar import is_compressed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.store.format.sources import Sources
    from paceline.store.in_place.data import Block
    from paceline.store.write.sources.member_classes import ArchiveMember
    from paceline.store.write.sources.source import SourceClasses


class ArchivesData:
    """The members of tar archives.

    Raises:
        NotFound: there is no such archive.
        UsageError: an archive is compressed.
        StorageError: an archive cannot be read.
    """

    has_checksums = False

    def __init__(self, paths: Sequence[Path], where: str, side_file: Path) -> None:
        self.where = where
        self.side_file = side_file
        self._paths = list(paths)
        self._archives = OpenArchives([os.fspath(path) for path in paths], "follow")
        for path in self._paths:
            if is_compressed(os.fspath(path)):
                raise UsageError(
                    "a compressed archive cannot be read in place",
                    where=str(path),
                    why="where a member begins is known only when all before it is decompressed",
                    fix=f"Pack it: paceline pack {where} DEST; or decompress it",
                )

    def sources(self, folder: Path) -> Sources:
        """Return what the archives are now."""
        return sources_of(SourceKind.TAR, self._paths, folder)

    def blocks(self) -> Iterator[Block]:
        """Yield all members."""
        members: list[ArchiveMember] = []
        labels: list[int] = []
        for member, label in self._archives.located():
            members.append(member)
            labels.append(label)
            if len(members) == BLOCK_SAMPLES:
                yield _block(members, labels)
                members, labels = [], []
        if members:
            yield _block(members, labels)

    def as_read(self, sources: Sources) -> Sources:
        """Return `sources`: there is nothing more to say."""
        return sources

    def access(self, folders: Sequence[bytes]) -> Access:
        """Return who may read all files."""
        del folders  # are in archives, or in names alone
        return Access.of(self._paths)

    def folders(self) -> list[bytes]:
        """Return all folders."""
        return self._archives.folders()

    def classes(self) -> SourceClasses:
        """Return the classes that ``.cls`` members name, or else the top-level folders."""
        return self._archives.classes()

    def holders(self, name: bytes) -> list[str]:
        """Return the first two archives that have a sample of a name."""
        return self._archives.holders(name)


def _block(members: list[ArchiveMember], labels: list[int]) -> Block:
    names = [member.name for member in members]
    offsets = np.zeros(len(names) + 1, np.uint64)
    np.cumsum([len(name) for name in names], out=offsets[1:])
    samples = SampleColumns(
        names=np.frombuffer(b"".join(names), np.uint8),
        name_offsets=offsets,
        labels=np.array(labels, np.int32),
        modes=np.array([member.mode for member in members], np.uint32),
        mtimes_ns=np.array([member.mtime_ns for member in members], np.int64),
        extent_counts=np.ones(len(members), np.uint32),
    )
    return samples, extent_columns(
        np.array([member.offset for member in members], np.uint64),
        np.array([member.length for member in members], np.uint64),
        np.array([member.archive for member in members], np.uint32),
    )
