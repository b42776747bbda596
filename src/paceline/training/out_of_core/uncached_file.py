"""A file without a name whose transfers leave the page cache alone.

Nothing is left of it when the process ends, however it ends. Pages of a file count as memory of the
job's control group, and push other files out. So the file is opened with O_DIRECT. Some file
systems refuse that (several network and FUSE file systems), and some take it and use the page cache
all the same (ext4 with data=journal): there each chunk is written back while the next one is
written, and then dropped, so that the cache holds two chunks at most.

    write  |--copy a--|--copy b--|--copy c--|
    disk              |write a---|write b---|write c---|
    cache             a          a b  (a is dropped when it is written)
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import StorageError, reason
from paceline.core.node import mount_of, read_mounts
from paceline.training.out_of_core.transfers import ALIGNMENT, aligned_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

CHUNK_BYTES = 4 << 20
MEMORY_FILE_SYSTEMS = ("ramfs", "tmpfs")
# Their pages cannot be dropped before the server has committed them, which only a sync asks for.
COMMITTED_FILE_SYSTEMS = ("nfs", "nfs4")
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # sync_file_range(2)
_NO_RANGE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)


class UncachedFile:
    """The file; one thread may write while another one reads.

    Args:
        folder: that has it, on a disk.

    Attributes:
        is_direct: whether transfers go past the page cache.

    Raises:
        StorageError: no file can be made there, or its files are memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        mount = mount_of(str(folder.resolve()), read_mounts())
        kind = mount.kind if mount is not None else ""
        if mount is not None and kind in MEMORY_FILE_SYSTEMS:
            raise StorageError(
                "cannot make a spill file",
                where=str(folder),
                why=f"{mount.point} is a {kind}: its files are memory themselves",
                fix="Choose a folder on a disk with spill_folder",
            )
        try:
            self.is_direct, self._descriptor = _open(folder)
        except OSError as problem:
            raise StorageError(
                "cannot make a spill file",
                where=str(folder),
                why=reason(problem),
                fix="Choose another folder with spill_folder",
            ) from problem
        self._written: WriteBack | None = None
        if not self.is_direct:
            self._written = WriteBack(self._descriptor, is_committed=kind in COMMITTED_FILE_SYSTEMS)
            # What is read ahead of a chunk would stay.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def write(self, chunks: Sequence[np.ndarray], begin: int) -> None:
        """Write aligned bytes, one array after the other.

        Raises:
            StorageError: the disk is full or failed.
        """
        views = [memoryview(chunk) for chunk in chunks]  # type: ignore[arg-type]  # arrays of bytes are buffers
        offset = begin
        try:
            while views:
                count = os.pwritev(self._descriptor, self._next(views), offset)
                if self._written is not None:
                    self._written.add(offset, count)
                offset += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
            if self._written is not None:
                self._written.finish()
        except OSError as problem:
            fix = "Free space" if problem.errno == errno.ENOSPC else "Check the disk"
            raise StorageError(
                "cannot spill tensors",
                where=str(self._folder),
                why=reason(problem),
                fix=f"{fix}, or choose another folder with spill_folder",
            ) from problem

    def _next(self, views: list[memoryview]) -> list[memoryview]:
        """Return what to write in one call: all, or a chunk of what goes through the cache."""
        if self._written is None:
            return views
        found, left = [], CHUNK_BYTES
        for view in views:
            found.append(view[:left])
            left -= len(found[-1])
            if not left:
                break
        return found

    def read(self, into: np.ndarray, begin: int) -> None:
        """Fill aligned memory with what was written.

        Raises:
            StorageError: the disk failed.
        """
        view, offset = memoryview(into), begin  # type: ignore[arg-type]  # as above
        try:
            while view:
                part = view if self.is_direct else view[:CHUNK_BYTES]
                count = os.preadv(self._descriptor, [part], offset)
                if not count:
                    raise OSError(errno.EIO, "the spill file is shorter than what was written")
                if not self.is_direct:
                    os.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_DONTNEED)
                view, offset = view[count:], offset + count
        except OSError as problem:
            raise StorageError(
                "cannot read spilled tensors",
                where=str(self._folder),
                why=reason(problem),
                fix="Check the disk, or choose another folder with spill_folder",
            ) from problem

    def close(self) -> None:
        """Free the file."""
        os.close(self._descriptor)


class WriteBack:
    """Writes what the page cache has to the disk, and drops it; of the writing thread.

    Args:
        descriptor: of the file.
        is_committed: whether its file system drops nothing that no sync has committed.
    """

    def __init__(self, descriptor: int, *, is_committed: bool) -> None:
        self._descriptor = descriptor
        self._sync: Any = None
        if not is_committed:
            library = ctypes.CDLL(None, use_errno=True)
            self._sync = getattr(library, "sync_file_range", None)  # glibc has it, others may not
        self._begun: tuple[int, int] | None = None  # offset and bytes of the chunk on its way

    def add(self, offset: int, size_bytes: int) -> None:
        """Begin to write a chunk back, and drop the one before.

        Raises:
            OSError: the disk is full or failed.
        """
        self._sync_range(offset, size_bytes, _WRITE)
        self.finish()
        self._begun = offset, size_bytes

    def finish(self) -> None:
        """Wait until the last chunk is written, and drop it.

        Raises:
            OSError: the disk is full or failed.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if not self._sync_range(*begun, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
            os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, *begun, os.POSIX_FADV_DONTNEED)

    def _sync_range(self, offset: int, size_bytes: int, flags: int) -> bool:
        """Return whether it was done; not where the file system cannot."""
        if self._sync is None:
            return False
        number = ctypes.c_int64
        if self._sync(self._descriptor, number(offset), number(size_bytes), flags) == 0:
            return True
        problem = ctypes.get_errno()
        if problem in _NO_RANGE:
            self._sync = None
            return False
        raise OSError(problem, os.strerror(problem))


def _open(folder: Path) -> tuple[bool, int]:
    """Open a file without a name; return whether transfers go past the page cache."""
    descriptor, path = tempfile.mkstemp(prefix="paceline-spill-", dir=folder)
    name = Path(path)
    try:
        os.fchmod(descriptor, 0o600)
        try:
            direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:  # EINVAL: a file system without direct transfers
            return False, descriptor
        is_direct = _leaves_no_pages(direct, descriptor)
        os.close(descriptor if is_direct else direct)
        return is_direct, direct if is_direct else descriptor
    finally:
        name.unlink()


def _leaves_no_pages(direct: int, cached: int) -> bool:
    """Whether a direct write is not in the page cache, where a read that may not wait finds it."""
    page = aligned_memory(ALIGNMENT).zero_().numpy()
    try:
        os.pwrite(direct, memoryview(page), 0)
    except OSError:  # of another alignment; a full disk is said where it matters
        return False
    try:
        os.preadv(cached, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError:  # EAGAIN; or EOPNOTSUPP: it cannot tell
        return True
    return False
