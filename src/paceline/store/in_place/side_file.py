"""Makes the index of data in place, keeps it in a file, and makes it again when the data changed.

::

    x.mdb              the user's
    x.mdb.pace         the side file: the index of a pack, whose shard is x.mdb
    .x.mdb.pace.*      a folder in which a side file is being made; renamed to it when complete
    .x.mdb.pace.lock   held meanwhile (`indexing_lock`)

Where the folder of the data cannot be written to, the side file lies in the user's cache, under a
name made from the path of the data. A side file is a cache, too: it is not synced to storage, and
one that is found to be damaged when it is opened, or is of other data, is made again; a large one
is verified where it is used, and damage there is an error. Reading never relies on it alone: the
reader compares each file with what the side file says when it opens it
(`native/src/pack_reader.cpp`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paceline.core.clock import SystemClock
from paceline.core.config import cache_folder
from paceline.core.errors import (
    CorruptPack,
    DataChanged,
    StorageError,
    UsageError,
    os_errors_as,
    reason,
)
from paceline.core.files import sync_folder
from paceline.store.format.layout import INDEX_NAME, PARTIAL_SUFFIX
from paceline.store.format.sources import SETTLING_NS
from paceline.store.in_place.archives import ArchivesData
from paceline.store.in_place.indexing_lock import IndexingLock
from paceline.store.read.pack import Pack
from paceline.store.write.files import PackFile, PackFolder
from paceline.store.write.index.build import IndexMetadata, write_index
from paceline.store.write.index.sorted_runs import SortedRun, SortedRunWriter, open_sorted_run

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    from paceline.core.files import Access
    from paceline.store.format.sources import Sources
    from paceline.store.in_place.data import DataInPlace

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 3  # at data that are written to while they are indexed
_CACHE = "in-place"


def open_data(data: DataInPlace, options: dict[str, Any]) -> Pack:
    """Return the pack that `data` is, with an index that is of the data as they are now.

    Args:
        data: what the user named.
        options: what `read_options` returned.

    Raises:
        PacelineError: the data cannot be read, are damaged, or change all the time.
    """
    places = _places(data)
    looked = {place: _inode(place) for place in places}  # before: one may be made while we look
    for place in places:
        pack = _open_if_current(data, place, options)
        if pack is not None:
            return pack
    place = _writable_place(data)
    looked_at = looked.get(place)
    with writing_side_file(place), IndexingLock(place) as lock:
        for is_ours in lock.attempts():
            inode = _inode(place)
            if inode != looked_at:  # another process made it
                looked_at = inode
                pack = _open_if_current(data, place, options)
                if pack is not None:
                    return pack
            if is_ours:
                break
        return _indexed(data, lock, options)


def _inode(place: Path) -> tuple[int, int] | None:
    """Return what tells one side file from the next at the same place."""
    try:
        status = place.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _indexed(data: DataInPlace, lock: IndexingLock, options: dict[str, Any]) -> Pack:
    """Index `data`, again if they change meanwhile, and return them as a pack."""
    problem: DataChanged | None = None
    for _ in range(_ATTEMPTS):
        try:
            make_side_file(data, lock)
            return _opened(data, lock.place, options)
        except DataChanged as changed:  # perhaps by a program that has just finished
            problem = changed
    assert problem is not None
    raise problem


def _settled_sources(data: DataInPlace, folder: SideFolder) -> Sources:
    """Return what the files are, once a write from now on would change their times."""
    clock = SystemClock()
    for _ in range(_ATTEMPTS):
        sources = data.sources(folder.place.parent)
        is_beside = folder.place == data.side_file
        if is_beside and sources.is_settled(folder.now_ns()):
            return sources
        clock.wait(threading.Event(), 2 * SETTLING_NS / 1e9)
        if not is_beside:  # perhaps on another file system, whose clock says nothing of the data
            return sources
    raise _changed(data, "it is written to all the time")


def make_side_file(data: DataInPlace, lock: IndexingLock) -> None:
    """Index `data` and put the index where `lock` is for.

    Raises:
        UsageError: two samples have one name, or the data are not read in place.
        CorruptData: the data are damaged.
        DataChanged: the data were written to meanwhile.
        StorageError: the side file cannot be written.
    """
    place = lock.place
    with writing_side_file(place), SideFolder(lock) as folder:
        before = _settled_sources(data, folder)
        # A file beside the user's data, even if these were only to be listed, and perhaps a while.
        _LOG.warning(
            "indexing %s, once: %s file(s), %s bytes; the index will be %s",
            data.where,
            f"{len(before.files):,}",
            f"{sum(before.sizes):,}",
            place,
        )
        columns = SortedRunWriter(folder)
        for samples, extents in data.blocks():
            columns.add(samples, extents)
        columns.flush()
        difference = before.difference(data.sources(place.parent))
        if difference:
            raise _changed(data, difference)
        classes = data.classes()
        sorted_runs = [
            open_sorted_run(folder.folder / name, classes.label_map) for name, _ in columns.files
        ]
        metadata = IndexMetadata(
            folders=data.folders(),
            classes=classes.names,
            shard_lengths=before.sizes,
            shard_digests=[],
            sources=data.as_read(before),
            has_checksums=data.has_checksums,
            holders=data.holders if isinstance(data, ArchivesData) else None,
        )
        folder.put(sorted_runs, metadata, data.access(metadata.folders), durable=False)


class SideFolder(PackFolder):
    """A folder in which a side file is made; `put` puts it in its place.

    Leaving the context removes the folder. So does the next that makes this side file, if a process
    was killed here.

    Args:
        lock: held by this process.
    """

    def __init__(self, lock: IndexingLock) -> None:
        self.place = lock.place
        self._prefix = f".{self.place.name}."
        self._is_alone = lock.is_exclusive
        self._is_durable = False

    def __enter__(self) -> Self:
        if self._is_alone:
            self._remove_stale()
        made = tempfile.mkdtemp(prefix=self._prefix, suffix=PARTIAL_SUFFIX, dir=self.place.parent)
        super().__init__(Path(made))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self, file: PackFile) -> None:
        """Close `file`; it is made durable only if it cannot be made again cheaply."""
        file.close(commit=self._is_durable)
        self._open.remove(file)

    def now_ns(self) -> int:
        """Return the time that this file system would give a file that is written to now."""
        os.utime(self.folder)
        return self.folder.stat().st_mtime_ns

    def put(
        self,
        sorted_runs: Sequence[SortedRun],
        metadata: IndexMetadata,
        access: Access,
        *,
        durable: bool,
    ) -> None:
        """Write the index and rename it to the side file, read by none who may not read the data.

        It has names and times of files, and what a class is called.
        """
        self._is_durable = durable
        write_index(self, INDEX_NAME, sorted_runs, metadata)
        with (self.folder / INDEX_NAME).open("rb") as file:
            access.limit(file.fileno())
        (self.folder / INDEX_NAME).replace(self.place)
        if durable:
            sync_folder(self.place.parent)

    def _remove_stale(self) -> None:
        """Remove folders of processes that were killed: the lock is ours."""
        for entry in self.place.parent.glob(f"{_escaped(self._prefix)}*{PARTIAL_SUFFIX}"):
            shutil.rmtree(entry, ignore_errors=True)


def _open_if_current(data: DataInPlace, place: Path, options: dict[str, Any]) -> Pack | None:
    """Return the pack if the side file at `place` is of the data as they are now, else None."""
    if not place.is_file():
        return None
    try:
        pack = _opened(data, place, options)
        sources = pack.index.sources
    except (CorruptPack, StorageError, UsageError) as problem:  # damaged, stale, or newer
        why = problem.why or problem.what
        _LOG.warning("%s is not used (%s): indexing %s again", place, why, data.where)
        return None
    difference = "its index is that of a pack"
    if sources is not None:
        difference = sources.difference(data.sources(place.parent))
    if not difference:
        return pack
    _LOG.warning("%s changed since it was indexed (%s): indexing it again", data.where, difference)
    return None


def _opened(data: DataInPlace, place: Path, options: dict[str, Any]) -> Pack:
    pack = Pack(data.where, options, place)
    len(pack)  # opens it
    return pack


def _places(data: DataInPlace) -> list[Path]:
    """Return where the side file may lie: beside the data, or in the user's cache."""
    beside = data.side_file
    path = os.fsencode(beside.absolute())
    cached = f"{hashlib.sha256(path).hexdigest()[:32]}-{beside.name[-80:]}"
    return [beside, cache_folder() / _CACHE / cached]


def _writable_place(data: DataInPlace) -> Path:
    beside, cached = _places(data)
    if os.access(beside.parent, os.W_OK | os.X_OK) and not beside.is_dir():
        return beside
    with writing_side_file(cached):
        cached.parent.mkdir(parents=True, exist_ok=True)
    return cached


def writing_side_file(place: Path) -> contextlib.AbstractContextManager[None]:
    """Let errors of the system leave the context as a StorageError about the side file."""
    return os_errors_as(
        lambda problem: StorageError(
            "cannot write the index of the data",
            where=str(place),
            why=reason(problem),
            fix="Free space or check the permissions; or pack the data: paceline pack",
        )
    )


def _changed(data: DataInPlace, difference: str) -> DataChanged:
    return DataChanged(
        "the data was changed while it was indexed",
        where=data.where,
        why=difference,
        fix="Open it when no other program writes to it",
    )


def _escaped(prefix: str) -> str:
    """Return `prefix` as a pattern that matches only itself."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in prefix)
