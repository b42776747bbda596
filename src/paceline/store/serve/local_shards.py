"""Shards of a pack in a folder on local storage: each is there complete and right, or not at all.

A shard is written to a file without a name, which gets its name when all bytes are there and have
the digest of the index: who is killed while writing leaves nothing. Where the file system has no
such files, it is written beside its place and renamed; what a kill leaves then is removed when the
folder is opened next.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from typing import TYPE_CHECKING

from paceline.core.errors import CorruptPack, StorageError, UsageError, storage_errors
from paceline.core.files import (
    Access,
    LockOutcome,
    commit_chunks,
    free_bytes,
    sync_folder,
    try_lock,
    write_all,
)
from paceline.store.format.layout import INDEX_NAME, NUMBERED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from paceline.store.read.pack import Pack

_PIECE_BYTES = 4 << 20
_MARKER = ".local-shards"  # of a folder whose shards may be deleted
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)  # open(2), O_TMPFILE


class LocalShards:
    """The folder, locked against other processes from `open` to `close`; `write` by any thread.

    Args:
        folder: is made if it is not there.
        pack: whose shards these are; only its index is used.
    """

    def __init__(self, folder: Path, pack: Pack) -> None:
        self.folder = folder
        self.lengths = [int(length) for length in pack.index.shard_lengths]
        self._pack = pack
        self._digests = pack.index.shard_digests
        self._lock = -1
        self._room = threading.Lock()
        self._left: dict[object, int] = {}  # bytes to be written still, by what writes them

    def open(self) -> None:
        """Prepare the folder: its index, and nothing that a killed process left.

        Raises:
            StorageError: it cannot be written.
            UsageError: it holds another pack or other files, or another process uses it.
        """
        fix = "Free space there, or give another folder"
        try:
            with storage_errors("cannot prepare local storage", where=self.folder, fix=fix):
                self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes use the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def path(self, shard: int) -> Path:
        """Return where a shard lies, or will lie."""
        return self.folder / self._pack.index.shard_path(shard).name

    def present(self) -> Iterator[int]:
        """Yield the shards that are here."""
        for shard, length in enumerate(self.lengths):
            with contextlib.suppress(FileNotFoundError):
                if self.path(shard).stat().st_size == length:
                    yield shard

    def write(self, shard: int, pieces: Iterable[bytes], origin: str) -> None:
        """Write a shard, whose bytes come in `pieces` from `origin`.

        Raises:
            StorageError: there is no room for it, or it cannot be written.
            CorruptPack: the bytes are not those that were packed; nothing is left of them.
        """
        with self._room_for(shard) as writer:
            self._write(shard, self._checked(shard, pieces, origin), writer)

    def _write(self, shard: int, checked: Iterable[bytes], writer: object) -> None:
        path = self.path(shard)
        fix = "Free space there, or spread the pack over more nodes: paceline store fit"
        with storage_errors("cannot write to local storage", where=path, fix=fix):
            try:
                descriptor = os.open(self.folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            except OSError as problem:
                if problem.errno not in _NO_UNNAMED:
                    raise
                commit_chunks(path, checked, self._access_of(shard))
                return
            try:
                self._access_of(shard).limit(descriptor)
                for piece in checked:
                    write_all(descriptor, piece)
                    self._left[writer] -= len(piece)
                os.fsync(descriptor)
                path.unlink(missing_ok=True)  # of another length, or it would be held already
                # Only with a folder does Python 3.11 call linkat, which can follow links.
                name = f"/proc/self/fd/{descriptor}"
                os.link(name, path, src_dir_fd=self._lock, follow_symlinks=True)
            finally:
                os.close(descriptor)
            sync_folder(self.folder)

    def _access_of(self, shard: int) -> Access:
        """Return who may read the shard in the pack that this is a copy of."""
        return Access.of([self._pack.path / INDEX_NAME, self._pack.index.shard_path(shard)])

    @contextlib.contextmanager
    def _room_for(self, shard: int) -> Iterator[object]:
        """Take room for a shard: other threads do not count on it, though nothing is written yet.

        Of two shards that are written at the same time where one has room, one fails at once.
        """
        length, writer = self.lengths[shard], object()
        with self._room:
            taken = sum(
                self._left.values()
            )  # before what is free: what is written then counts twice
            free = free_bytes(self.folder)
            if free is not None and free - taken < length:
                others = f", {taken} of them for shards that are being written" if taken else ""
                raise StorageError(
                    "local storage is full",
                    where=str(self.folder),
                    why=f"shard {shard} has {length} bytes, {free} are free{others}",
                    fix="Free space there, or spread the pack over more nodes: paceline store fit",
                )
            self._left[writer] = length
        try:
            yield writer
        finally:
            with self._room:
                del self._left[writer]

    def is_right(self, shard: int) -> bool:
        """Return whether a shard that is here has the digest of the index; True if there is none.

        Raises:
            OSError: it cannot be read.
        """
        found = hashlib.sha256()
        with self.path(shard).open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                found.update(piece)
        return not self._digests or found.digest() == self._digests[shard]

    def remove(self, shard: int) -> None:
        """Delete a shard. Who has its file open can still read it."""
        self.path(shard).unlink(missing_ok=True)

    def _prepare(self) -> None:
        is_new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if is_new:
            Access.of([self._pack.path]).limit(self._lock)
        if try_lock(self._lock) is LockOutcome.HELD:
            raise UsageError(
                "another process keeps shards in this folder",
                where=str(self.folder),
                fix="Give each node and each rank a folder of its own, or end that process",
            )
        marker = self.folder / _MARKER
        if not marker.exists():
            if any(NUMBERED.fullmatch(path.name) for path in self.folder.iterdir()):
                raise UsageError(
                    "will not keep shards in the folder of a pack",
                    where=str(self.folder),
                    why="shards that are not needed any more are deleted there",
                    fix="Give a folder that is empty, or not there",
                )
            marker.touch()
        wanted = (self._pack.path / INDEX_NAME).read_bytes()
        index = self.folder / INDEX_NAME
        if not index.exists():
            commit_chunks(index, [wanted], Access.of([self._pack.path / INDEX_NAME]))
        if index.read_bytes() != wanted:
            raise UsageError(
                "local storage holds another pack",
                where=str(self.folder),
                fix="Give an empty folder, or delete this one",
            )
        for path in self.folder.glob(".*.partial"):
            path.unlink(missing_ok=True)

    def _checked(self, shard: int, pieces: Iterable[bytes], origin: str) -> Iterator[bytes]:
        found = hashlib.sha256()
        for piece in pieces:
            found.update(piece)
            yield piece
        if self._digests and found.digest() != self._digests[shard]:
            raise CorruptPack(
                f"shard {shard} was copied damaged",
                where=origin,
                why="its SHA-256 is not the one in the index",
                fix="Repair the pack: paceline store repair",
            )
