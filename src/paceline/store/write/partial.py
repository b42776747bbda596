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
from paceline.core.files import sync_folder, try_lock
from paceline.store.format.layout import PARTIAL_SUFFIX, UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

_OURS = re.compile(r"index\.pace|(shard|parity)-\d{5,}\.pace|" + UNFINISHED.pattern)


class PackFile:
    """A file of the pack; durable when closed without error."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self.path = path
        self.descriptor = os.open(path, flags, 0o644)
        self.length = 0
        self.begun = 0  # up to where the system was asked to write to storage

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        with memoryview(data) as left:
            done = 0
            while done < len(left):
                done += os.write(self.descriptor, left[done:])
        self.length += done

    def write_at(self, data: memoryview, position: int) -> None:
        """Write `data` at `position`, for files whose parts grow side by side."""
        done = 0
        while done < len(data):
            done += os.pwrite(self.descriptor, data[done:], position + done)
        self.length = max(self.length, position + done)

    def sync(self) -> None:
        """Return once every byte so far is on storage."""
        os.fsync(self.descriptor)

    def close(self, *, commit: bool) -> None:
        """Close; with `commit`, only once every byte is on storage."""
        if self.descriptor < 0:
            return
        try:
            if commit:
                self.sync()
        finally:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


class PackFolder:
    """A locked folder in which files of a pack are made.

    Attributes:
        folder: its path.
        resumable: whether enough is durable for another run to go on from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resumable = False
        self._lock = -1
        self._open: list[PackFile] = []

    def create(self, name: str) -> PackFile:
        """Return a new file of the pack."""
        file = PackFile(self.folder / name)
        self._open.append(file)
        return file

    def close(self, file: PackFile) -> None:
        """Make `file` durable and close it."""
        file.close(commit=True)
        self._open.remove(file)

    def discard(self, file: PackFile) -> None:
        """Close `file` and remove it."""
        file.close(commit=False)
        self._open.remove(file)
        self.remove([file.path.name])

    def names(self) -> list[str]:
        """Return the names of all files in the folder, whatever its path says now."""
        return os.listdir(self._lock)  # noqa: PTH208  # by descriptor

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            os.unlink(name, dir_fd=self._lock)

    def lock(self) -> bool:
        """Lock the folder; return False when it has just gone.

        Raises:
            UsageError: another run has locked it, or it is no folder.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.folder, flags)
        except FileNotFoundError:
            return False
        except OSError as problem:
            if problem.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _not_ours(self.folder, "it is not a folder") from None
            raise
        if not try_lock(descriptor):
            os.close(descriptor)
            raise UsageError(
                "another run is packing to this destination",
                where=str(self.folder),
                fix="Wait for it, or choose another destination",
            )
        # Its owner may have committed it (renamed it away) between our open and our lock.
        try:
            if os.path.samestat(os.fstat(descriptor), self.folder.lstat()):
                self._lock = descriptor
                return True
        except FileNotFoundError:
            pass
        os.close(descriptor)
        return False

    def unlock(self) -> None:
        """Let go of the folder, and of files that were not closed."""
        for file in self._open:
            file.close(commit=False)
        self._open.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class PartialPack(PackFolder):
    """Owns ``DST.partial`` until `commit`.

    Leaving the context without it removes everything, unless `resumable` says that enough is done
    for the next run to go on from.
    """

    def __init__(self, destination: Path) -> None:
        super().__init__(destination.with_name(destination.name + PARTIAL_SUFFIX))
        self.destination = destination

    def __enter__(self) -> Self:
        locked = False
        while not locked:
            self._refuse_existing()
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
            try:
                locked = self.lock()
            except OSError:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()  # if it is empty
                raise
        try:
            for name in self.names():
                if not _OURS.fullmatch(name):
                    why = f"it holds {name!a}, which is not part of a pack"
                    raise _not_ours(self.folder, why)
        except BaseException:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # if it is empty
            self.unlock()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What a source cannot be packed for will not be otherwise the next time.
        is_kept = self.resumable and not isinstance(problem, UsageError)
        if self._lock >= 0 and not is_kept and self._is_in_place():  # not committed
            with contextlib.suppress(OSError, PacelineError):
                self.remove(self.names())
                self.folder.rmdir()
        self.unlock()

    def commit(self) -> None:
        """Turn the partial pack into the pack.

        Raises:
            DestinationExists: somebody else made the destination meanwhile; it is untouched.
        """
        for file in tuple(self._open):
            assert file.path.name.endswith(PARTIAL_SUFFIX)
            self.resumable = False  # this is the journal
            self.discard(file)
        self.remove(name for name in self.names() if name.endswith(PARTIAL_SUFFIX))
        sync_folder(self.folder)
        self._refuse_existing()
        try:
            self.folder.rename(self.destination)
        except OSError as problem:
            if problem.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _exists(self.destination) from None
            raise
        self.unlock()
        sync_folder(self.destination.parent)

    def _is_in_place(self) -> bool:
        """Return whether the rename is still to come: an interrupt may strike right behind it."""
        try:
            return os.path.samestat(os.fstat(self._lock), self.folder.lstat())
        except OSError:
            return False

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.destination):
            raise _exists(self.destination)


def check_destination(source: Path | None, destination: Path) -> None:
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
    if source is not None and destination.parent.resolve().is_relative_to(source.resolve()):
        raise UsageError(
            "the destination lies inside the source",
            where=str(destination),
            why="the pack would hold itself",
            fix="Choose a destination outside " + str(source),
        )


def unwritable(path: Path, problem: OSError, *, kept: bool = False) -> StorageError:
    """Return the error for a destination that the system refuses to write.

    Args:
        path: the destination.
        problem: what the system said.
        kept: whether a folder was left behind that the next run can go on from.
    """
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "Free space or choose another destination" if full else "Check the place, and pack again"
    if kept:
        fix += f"; what is packed so far is kept in {path.name}{PARTIAL_SUFFIX}"
    else:
        fix += "; nothing was left behind"
    return StorageError(
        "the disk is full" if full else "cannot write the pack",
        where=str(path),
        why=problem.strerror or str(problem),
        fix=fix,
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
