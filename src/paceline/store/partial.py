"""A pack in the making: a folder beside the destination that becomes it by one rename.

::

    DST.partial/   mkdir, lock, clear      a killed run leaves this; readers refuse it by its name
        shards, index: write, fsync        and the next run replaces it
        fsync the folder
    DST/           rename, fsync parent    from here on the pack is whole

The lock (flock on the folder) keeps two runs from mixing their files; the kernel drops it when its
owner dies. Only files of a pack are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from typing import TYPE_CHECKING, Self

from paceline.core.errors import (
    DestinationExists,
    NotFound,
    PacelineError,
    StorageError,
    UsageError,
)
from paceline.core.files import sync_folder
from paceline.store.format import PARTIAL_SUFFIX

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_BUFFER_BYTES = 4 << 20
_OURS = re.compile(r"index\.pace|shard-\d{5,}\.pace")


class PackFile:
    """A file of the pack, written once from front to back; durable when closed without error."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o644)
        self._buffer = bytearray()
        self.length = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        self._buffer += data
        self.length += len(data)
        if len(self._buffer) >= _BUFFER_BYTES:
            self._drain()

    def close(self, *, commit: bool) -> None:
        """Close; with `commit`, only once every byte is on storage."""
        if self._descriptor < 0:
            return
        try:
            if commit:
                self._drain()
                os.fsync(self._descriptor)
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _drain(self) -> None:
        with memoryview(self._buffer) as left:
            done = 0
            while done < len(left):
                done += os.write(self._descriptor, left[done:])
        self._buffer.clear()


class PartialPack:
    """Owns ``DST.partial`` until `commit`; leaving the context without it removes everything."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = destination.with_name(destination.name + PARTIAL_SUFFIX)
        self._lock = -1
        self._open: list[PackFile] = []

    def __enter__(self) -> Self:
        while self._lock < 0:
            self._refuse_existing()
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
            try:
                self._lock = self._try_lock()
            except OSError:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()  # if it is empty
                raise
        try:
            self._clear()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._open:
            file.close(commit=False)
        if self._lock >= 0:  # not committed
            with contextlib.suppress(OSError, PacelineError):
                self._clear()
                self.folder.rmdir()
        self._unlock()

    def create(self, name: str) -> PackFile:
        """Return a new file of the pack."""
        file = PackFile(self.folder / name)
        self._open.append(file)
        return file

    def close(self, file: PackFile) -> None:
        """Make `file` durable and close it."""
        file.close(commit=True)
        self._open.remove(file)

    def commit(self) -> None:
        """Turn the partial pack into the pack.

        Raises:
            DestinationExists: somebody else made the destination meanwhile; it is untouched.
        """
        assert not self._open
        sync_folder(self.folder)
        self._refuse_existing()
        try:
            self.folder.rename(self.destination)
        except OSError as problem:
            if problem.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _exists(self.destination) from None
            raise
        self._unlock()
        sync_folder(self.destination.parent)

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.destination):
            raise _exists(self.destination)

    def _try_lock(self) -> int:
        """Return a descriptor that locks the folder; -1 when the folder has just gone."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.folder, flags)
        except FileNotFoundError:
            return -1
        except OSError as problem:
            if problem.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _not_ours(self.folder, "it is not a folder") from None
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(
                "another run is packing to this destination",
                where=str(self.folder),
                fix="Wait for it, or choose another destination",
            ) from None
        except OSError:  # a file system without locks: then one run at a time is up to the user
            pass
        # Its owner may have committed it (renamed it away) between our open and our lock.
        try:
            if os.path.samestat(os.fstat(descriptor), self.folder.lstat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
        return -1

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _clear(self) -> None:
        """Remove what a killed run left; refuse to touch anything else."""
        names = os.listdir(self._lock)  # noqa: PTH208  # the locked folder, whatever its path says now
        for name in names:
            if not _OURS.fullmatch(name):
                raise _not_ours(self.folder, f"it holds {name!a}, which is not part of a pack")
        for name in names:
            os.unlink(name, dir_fd=self._lock)


def check_destination(source: Path, destination: Path) -> None:
    """Refuse a destination that cannot become a pack of `source`, before any work is done.

    Raises:
        DestinationExists: there is something already.
        UsageError: it lies inside `source`, or is named like an unfinished pack.
        NotFound: its parent folder does not exist.
    """
    if os.path.lexists(destination):
        raise _exists(destination)
    if destination.name.endswith(PARTIAL_SUFFIX):
        raise UsageError(
            f"a pack cannot be named *{PARTIAL_SUFFIX}",
            where=str(destination),
            why="readers take such a folder for an unfinished pack",
            fix="Choose another name",
        )
    if not destination.parent.is_dir():
        raise NotFound(
            "no such folder to pack into",
            where=str(destination.parent),
            fix=f"Make it first: mkdir -p {destination.parent}",
        )
    real_source = source.resolve()
    if destination.parent.resolve().is_relative_to(real_source):
        raise UsageError(
            "the destination lies inside the source",
            where=str(destination),
            why="the pack would hold itself",
            fix="Choose a destination outside " + str(source),
        )


def unwritable(path: Path, problem: OSError) -> StorageError:
    """Return the error for a destination that the system refuses to write."""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return StorageError(
        "the disk is full" if full else "cannot write the pack",
        where=str(path),
        why=problem.strerror or str(problem),
        fix="Free space or choose another destination; nothing was left behind" if full else "",
    )


def _exists(destination: Path) -> DestinationExists:
    return DestinationExists(
        "the destination exists",
        where=str(destination),
        why="packs are never overwritten",
        fix="Remove it or choose another destination",
    )


def _not_ours(folder: Path, why: str) -> UsageError:
    return UsageError(
        "there is something in the way of the unfinished pack",
        where=str(folder),
        why=why,
        fix="Move it away or choose another destination",
    )
