"""Commit by write, fsync, rename: a file has the old or the new content, never a mixture."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import stat
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING

from paceline.core.errors import (
    CorruptData,
    DestinationExists,
    NotFound,
    StorageError,
    reason,
    storage_errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_ of <linux/falloc.h>
_BLOCK = 1 << 16  # a multiple of all file systems' blocks


@dataclass(frozen=True, slots=True)
class Access:
    """Who may read some files, so that what is made of them is not read by others.

    Attributes:
        mode: permission bits that all of them grant; of a folder, those of reading it.
        uid: owner of the first.
        gid: group of the first.
    """

    mode: int
    uid: int
    gid: int

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Access:
        """Return what these files or folders allow; a path that cannot be looked at allows nothing.

        Raises:
            OSError: the first cannot be looked at.
        """
        first: os.stat_result | None = None
        mode = 0o777
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                if first is None:
                    raise
                mode = 0
                continue
            first = first or status
            mode &= status.st_mode
            if status.st_gid != first.st_gid:
                mode &= ~0o070
        assert first is not None
        return cls(mode, first.st_uid, first.st_gid)

    def limit(self, descriptor: int) -> None:
        """Take from an open file or folder, of this user's making, what these files do not grant.

        Root gives it to their owner. Where the group is another one, it gets nothing.

        Raises:
            OSError: the permissions cannot be changed.
        """
        made = os.fstat(descriptor)
        if (made.st_uid, made.st_gid) != (self.uid, self.gid):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, self.uid, self.gid)
        granted = self.mode if os.fstat(descriptor).st_gid == self.gid else self.mode & ~0o070
        own = 0o700 if stat.S_ISDIR(made.st_mode) else 0o600
        os.fchmod(descriptor, stat.S_IMODE(made.st_mode) & granted | own)


def commit_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a crash at any moment leaves the old or the new content.

    Raises:
        StorageError: the disk is full or the folder not writable; the old content is intact.
    """
    commit_chunks(path, (data,))


def commit_chunks(path: Path, chunks: Iterable[bytes], access: Access | None = None) -> None:
    """Write `chunks` one after the other, for content larger than memory; see `commit_bytes`.

    With `access`, nobody may read it who may not read these files.
    """
    partial = _partial(path)
    fix = "Free space or choose another path; the old content is unchanged"
    try:
        with storage_errors("cannot write", where=path, fix=fix):
            with partial.open("wb") as file:
                if access is not None:
                    access.limit(file.fileno())
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_folder(path.parent)
    finally:  # also when making the chunks failed; after the rename there is nothing left
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Give the context the path of a folder to make, which then takes the place of `folder`.

    If the context fails, what it made is removed, and what was at `folder` stays.

    Raises:
        OSError: the folder cannot be replaced.
    """
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        if folder.is_dir():
            shutil.rmtree(folder)
        partial.replace(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that are free where `path` lies, or will lie, as `df` shows them.

    None: the file system does not say. Quotas are not seen.
    """
    try:
        found = os.statvfs(path)
    except OSError:  # not there yet, or in a folder that one may not search
        return None if path == path.parent else free_bytes(path.parent)
    return found.f_frsize * found.f_bavail if found.f_blocks else None


def require_space(path: Path, least_bytes: int, most_bytes: int, *, what: str, fix: str) -> None:
    """Refuse to write what cannot fit, before it is begun; warn of what may not fit.

    Args:
        path: the destination.
        least_bytes: that will be written in any case.
        most_bytes: that may be written.
        what: is written, for example "the pack".
        fix: what the user can do about it, besides freeing space.

    Raises:
        StorageError: fewer than `least_bytes` are free.
    """
    free = free_bytes(path)
    if free is None or most_bytes <= free:
        return
    if least_bytes > free:
        raise StorageError(
            f"too little space for {what}",
            where=str(path),
            why=f"{_size(least_bytes)} are needed, {_size(free)} are free",
            fix=f"Free space or choose another destination; {fix}",
        )
    _LOG.warning(
        "%s: there may be too little space for %s: it needs up to %s, and %s are free",
        path,
        what,
        _size(most_bytes),
        _size(free),
    )


def _size(count: int) -> str:
    """Return bytes as a message has them.

    >>> _size(3 << 29), _size(5000)
    ('1.50 GiB', '5,000 bytes')
    """
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,} bytes"


class LockOutcome(Enum):
    """The outcome of an attempt to lock a file or folder."""

    ACQUIRED = auto()
    HELD = auto()  # by another process
    UNSUPPORTED = auto()  # the file system has no locks


def try_lock(descriptor: int) -> LockOutcome:
    """Lock an open file or folder against other processes, without waiting.

    Closing the descriptor, or the death of its owner, unlocks. If a file system has no locks, a
    warning is logged, once for each reason: the user must then make sure that one process at a time
    writes there.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockOutcome.HELD
    except OSError as problem:
        _warn_of_no_locks(reason(problem))
        return LockOutcome.UNSUPPORTED
    return LockOutcome.ACQUIRED


@cache
def _warn_of_no_locks(why: str) -> None:
    _LOG.warning(
        "this file system has no locks (%s): make sure that only one command at a time writes to "
        "the same destination",
        why,
    )


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> int:
    """Write all of `data` where the file stands; return how many bytes that is."""
    with memoryview(data) as rest:
        done = 0
        while done < len(rest):
            done += os.write(descriptor, rest[done:])
    return done


def write_all_at(descriptor: int, data: bytes | bytearray | memoryview, position: int) -> int:
    """Write all of `data` at `position` of the file; return how many bytes that is."""
    with memoryview(data) as rest:
        done = 0
        while done < len(rest):
            done += os.pwrite(descriptor, rest[done:], position + done)
    return done


def commit_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8; see `commit_bytes`. Bytes of paths that are not UTF-8 are escaped."""
    commit_bytes(path, text.encode(errors="backslashreplace"))


def check_replaceable(
    path: Path, is_same_kind: Callable[[Path], bool], *, what: str, fix: str
) -> None:
    """See that writing to the `path` that the user named replaces at most a file of one kind.

    Args:
        path: the destination.
        is_same_kind: whether a file there may be replaced.
        what: the kind, for example "a report".
        fix: what the user can do about another file.

    Raises:
        DestinationExists: something else is there.
        NotFound: the folder to write to is not there.
    """
    if path.exists() and not (path.is_file() and is_same_kind(path)):
        raise DestinationExists(f"will not overwrite what is not {what}", where=str(path), fix=fix)
    if not path.parent.is_dir():
        raise NotFound("no such folder", where=str(path.parent), fix="Make it first")


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines of UTF-8 to a file of this user, durably; it is made if it is not there.

    Raises:
        StorageError: it cannot be written; it may end with a part of them.
    """
    data = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    fix = "Free space on that file system, or make it writable again"
    with storage_errors("cannot append to a file", where=path, fix=fix):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def prepare_file(path: Path) -> None:
    """Make the folder of `path`, and see that a file can be written there, before work begins.

    Raises:
        StorageError: it cannot.
    """
    partial = _partial(path)
    fix = "Name a file in a folder that you may write to"
    with storage_errors("cannot write", where=path, fix=fix):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        partial.touch()
        partial.unlink()


def sync_folder(path: Path) -> None:
    """Make the names in folder `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a file that the user named, without a byte order mark.

    Raises:
        NotFound: there is no such file.
        StorageError: it is there but cannot be read.
        CorruptData: it is not UTF-8.
    """
    with storage_errors("cannot read", where=path, fix="Check that it is a file you may read"):
        try:
            return path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise NotFound("no such file", where=str(path), fix="Check the path") from None
        except UnicodeDecodeError as problem:
            raise CorruptData(
                "not a text file", where=str(path), why=str(problem), fix="Name a file of UTF-8"
            ) from None


def _partial(path: Path) -> Path:
    """Return the temporary file that becomes `path`: in the same folder, for the rename."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def free_middle(path: Path, most_bytes: int, note: str) -> None:
    """Free the middle of a file that others append to, so that it takes about `most_bytes` at most.

    Its begin and its end stay where they are, with zeros between them that take no space (a hole,
    fallocate(2)); `note` stands where they begin. Nothing happens where the file takes less, or the
    file system makes no holes.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        status = os.fstat(file)
        if status.st_blocks * 512 <= most_bytes:
            return
        text = f"\n{note}\n".encode()
        # Whole blocks are freed. Half of the limit is left to what is appended until the next look.
        begin = -(-(most_bytes // 4) // _BLOCK) * _BLOCK
        end = (status.st_size - most_bytes // 4) // _BLOCK * _BLOCK
        if end - begin > _BLOCK + len(text) and _punch_hole(file, begin, end - begin):
            os.pwrite(file, text, begin)
    finally:
        os.close(file)


def _punch_hole(file: int, begin: int, length: int) -> bool:
    """Return whether the bytes of a part of a file were freed."""
    libc = ctypes.CDLL(None, use_errno=True)
    offsets = (ctypes.c_int64(begin), ctypes.c_int64(length))
    return bool(libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, *offsets) == 0)
