"""Folders of files in place: each file is a sample, by its relative path.

As for packing, the top-level folders are the classes. Symbolic links are followed: nothing is
copied. Side files of what else was opened there are no samples.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.files import Access
from paceline.store.format.layout import SIDE_SUFFIX
from paceline.store.format.sources import STATE_TYPE, SourceKind, Sources
from paceline.store.in_place.data import extent_columns, name_from
from paceline.store.write.sources.folder_scan import FolderScan, open_root
from paceline.store.write.sources.source import SourceClasses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.store.in_place.data import Block


class FilesData:
    """The files below the folder `path`."""

    has_checksums = False

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        self.side_file = path.with_name(path.name + SIDE_SUFFIX)
        self._path = path
        self._folders: list[bytes] = []
        self._classes: list[bytes] = []

    def sources(self, folder: Path) -> Sources:
        """Return what the files are now; the order is that of their names."""
        root = name_from(folder, self._path)
        files: list[bytes] = []
        states = []
        with self._scan() as scan:
            for samples, lengths in scan.files():
                names, bounds = samples.names.tobytes(), samples.name_offsets.tolist()
                files += [root + b"/" + names[begin:end] for begin, end in pairwise(bounds)]
                state = np.zeros(len(lengths), STATE_TYPE)
                state["size"], state["mtime_ns"] = lengths, samples.mtimes_ns
                states.append(state)
        together = np.concatenate([np.zeros(0, STATE_TYPE), *states])
        return Sources(kind=SourceKind.FILES, files=files, states=together)

    def blocks(self) -> Iterator[Block]:
        """Yield all files."""
        shard = 0
        with self._scan() as scan:
            for samples, lengths in scan.files():
                count = len(lengths)
                shards = np.arange(shard, shard + count, dtype=np.uint32)
                yield samples, extent_columns(np.zeros(count, np.uint64), lengths, shards)
                shard += count
            self._folders, self._classes = scan.folders, scan.classes

    def as_read(self, sources: Sources) -> Sources:
        """Return `sources`: there is nothing more to say."""
        return sources

    def access(self, folders: Sequence[bytes]) -> Access:
        """Return who may list all folders."""
        return Access.of([self._path, *(self._path / os.fsdecode(name) for name in folders)])

    def folders(self) -> list[bytes]:
        """Return the relative paths of all folders, also of empty ones."""
        return self._folders

    def classes(self) -> SourceClasses:
        """Return the top-level folders, sorted; labels count them."""
        return SourceClasses(self._classes, None)

    @contextmanager
    def _scan(self) -> Iterator[FolderScan]:
        root = os.fsencode(self._path)
        descriptor = open_root(root)
        try:
            yield FolderScan(root, descriptor, "follow", skips_side_files=True)
        finally:
            os.close(descriptor)
