"""Files of a pack, and the locked folder in which they are made.

The lock (flock on the folder) keeps two processes from mixing their files; the kernel drops it when
its owner dies. Only files of a pack are ever removed.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.files import LockOutcome, try_lock, write_all, write_all_at

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The length and SHA-256 of a shard or parity file that is complete, for the index."""

    length: int
    digest: bytes


class PackFile:
    """A file of the pack; durable when closed without error.

    One thread at a time may use it; `ShardWriter` hands a shard from its writing thread to its
    syncing thread.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self.path = path
        self.descriptor = os.open(path, flags, 0o644)
        self.length = 0
        self.begun = 0  # bytes that the system was asked to write to storage

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        self.length += write_all(self.descriptor, data)

    def write_at(self, data: memoryview, position: int) -> None:
        """Write `data` at `position`, for files whose parts grow side by side."""
        end = position + write_all_at(self.descriptor, data, position)
        self.length = max(self.length, end)

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

    Files are created and closed by several threads of one packing, each its own files.

    Attributes:
        folder: path of the folder.
        resumable: whether enough is durable for another `pack` to resume from.
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
            UsageError: another process has locked it, or it is no folder.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.folder, flags)
        except FileNotFoundError:
            return False
        except OSError as problem:
            if problem.errno in (errno.ENOTDIR, errno.ELOOP):
                raise not_ours(self.folder, "it is not a folder") from None
            raise
        if try_lock(descriptor) is LockOutcome.HELD:
            os.close(descriptor)
            raise UsageError(
                "another process is packing to this destination",
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
        """Unlock the folder, and close files that are still open."""
        for file in self._open:
            file.close(commit=False)
        self._open.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def not_ours(folder: Path, why: str) -> UsageError:
    """Return the error for a folder in which no pack can be made."""
    return UsageError(
        "there is something in the way of the unfinished pack",
        where=str(folder),
        why=why,
        fix="Move it away or choose another destination",
    )
