"""Extracts samples of a pack as files: the inverse of `paceline pack`.

Names in a pack are data, and may come from anywhere. So a name is checked before anything is
written, and then walked down component by component from the open folder (openat, O_NOFOLLOW):
neither ``..`` nor a symbolic link that is put in the way leads out of the target. ::

    DST.extract.partial/   made, filled; a killed `extract` leaves this, the next one replaces it
    DST/                   syncfs, rename, fsync of the parent: from here on it is complete
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from paceline.core.errors import (
    CorruptPack,
    DestinationExists,
    NotFound,
    StorageError,
    UsageError,
    os_errors_as,
    reason,
)
from paceline.core.files import LockOutcome, require_space, sync_folder, try_lock, write_all
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from paceline.store.read.pack import Pack

_BATCH_SAMPLES = 256
_BATCH_BYTES = 64 << 20
_BLOCK_BYTES = 4096  # of a file system: what a file takes at most beyond its bytes
_PERMISSIONS = 0o777  # without set-user-id and similar: the pack may come from anywhere
_PARTIAL = ".extract.partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractSummary(Record):
    """What was extracted, or with `dry_run` would be."""

    path: str
    destination: str
    dry_run: bool
    sample_count: int
    folder_count: int
    sample_bytes: int


def extract(
    pack: Pack,
    destination: str | os.PathLike[str],
    names: Iterable[str | bytes] = (),
    *,
    dry_run: bool = False,
    check_space: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExtractSummary:
    """Write samples of `pack` as files below the new folder `destination`.

    Permissions and times are those of the files that were packed, and folders without samples are
    made as well. Killed at any moment, this leaves nothing at `destination`, or all of it.

    Args:
        pack: an open pack; all that is read is verified.
        destination: does not exist yet, or is an empty folder; its parent exists.
        names: names of samples, and of folders for all samples below them; empty: all samples.
        dry_run: write nothing.
        check_space: refuse to begin where the samples cannot fit, also in a dry run. A file system
            that compresses may hold them even so: then False.
        on_progress: called with the samples written so far and their total.

    Raises:
        DestinationExists: it is there and not empty; nothing was touched.
        NotFound: the pack has no such name, or the parent of `destination` does not exist.
        CorruptPack: a sample is damaged, or has a name that leads out of a folder.
        StorageError: the disk is full, or too small from the start; or the file system takes no
            such name.
    """
    target = Path(os.path.abspath(destination))  # noqa: PTH100  # keeps links as the user wrote them
    _check_target(target)
    pack.index.check()
    folders, samples = _selected(pack, list(names))
    for folder in folders:
        check_name(folder, str(pack.path))
    for sample in samples.tolist():
        check_name(os.fsencode(pack.names[sample]), str(pack.path))
    sample_bytes = int(pack.lengths[samples].sum())
    if check_space:
        most_bytes = sample_bytes + len(samples) * _BLOCK_BYTES
        fix = "or, where the file system compresses, use check_space=False (--no-space-check)"
        require_space(target, sample_bytes, most_bytes, what="the extracted files", fix=fix)
    if not dry_run:
        with (
            os_errors_as(lambda problem: _unwritable(target, problem)),
            _ExtractTarget(target) as tree,
        ):
            _fill(tree, pack, folders, samples, on_progress)
            tree.commit()
    return ExtractSummary(
        path=str(pack.path),
        destination=str(destination),
        dry_run=dry_run,
        sample_count=len(samples),
        folder_count=len(folders),
        sample_bytes=sample_bytes,
    )


def check_name(name: bytes, where: str) -> None:
    """Refuse a name that is no relative path to something below a folder.

    Raises:
        CorruptPack: it is absolute or empty, or has a component that is ``..``, ``.`` or empty.
    """
    components = name.split(b"/")
    if b"\0" in name or any(component in (b"", b".", b"..") for component in components):
        raise CorruptPack(
            f"the name {os.fsdecode(name)!a} cannot name a file",
            where=where,
            why="it would lead out of the destination",
            fix="Do not trust this pack; other samples can be extracted by name",
        )


def _selected(pack: Pack, names: list[str | bytes]) -> tuple[list[bytes], NDArray[np.int64]]:
    """Return the folders and the samples that `names` stand for, each once and in order."""
    if not names:
        everything = np.arange(len(pack), dtype=np.int64)
        return [os.fsencode(name) for name in pack.folder_names], everything
    folders: set[bytes] = set()
    samples: set[int] = set()
    for name in names:
        wanted = os.fsencode(name).strip(b"/")
        with contextlib.suppress(NotFound):
            samples.add(pack.find(wanted))
            continue
        try:
            for folder, entries in pack.walk(wanted):
                folders.add(os.fsencode(folder))
                samples.update(entry.number for entry in entries if not entry.is_folder)
        except NotFound:
            raise NotFound(
                f"no sample or folder named {os.fsdecode(wanted)!a}",
                where=str(pack.path),
                fix=f"List the names: paceline store ls {pack.path} --recursive",
            ) from None
    folders.discard(b"")
    return sorted(folders), np.array(sorted(samples), np.int64)


def _fill(
    tree: _ExtractTarget,
    pack: Pack,
    folders: list[bytes],
    samples: NDArray[np.int64],
    on_progress: Callable[[int, int], None] | None,
) -> None:
    for folder in folders:
        tree.make_folder(folder)
    names, modes, mtimes_ns = pack.names, pack.modes, pack.mtimes_ns
    done = 0
    for batch in _batches(samples, pack.lengths):
        for sample, body in _bodies(pack, batch):
            name = os.fsencode(names[sample])
            tree.write(name, body, int(modes[sample]), int(mtimes_ns[sample]))
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(samples))


def _batches(
    samples: NDArray[np.int64], lengths: NDArray[np.uint64]
) -> Iterator[NDArray[np.int64]]:
    """Yield `samples` in batches that one buffer holds; a large sample is a batch of its own."""
    first = 0
    while first < len(samples):
        end, size = first, 0
        while end < len(samples) and end - first < _BATCH_SAMPLES:
            size += int(lengths[samples[end]])
            if end > first and size > _BATCH_BYTES:
                break
            end += 1
        yield samples[first:end]
        first = end


def _bodies(pack: Pack, batch: NDArray[np.int64]) -> Iterator[tuple[int, memoryview]]:
    if len(batch) == 1:  # perhaps a large one: where it lies, it takes no memory
        yield int(batch[0]), pack.view(int(batch[0]))
        return
    buffer, offsets = pack.read_batch(batch)
    for k, sample in enumerate(batch.tolist()):
        yield sample, buffer[offsets[k] : offsets[k + 1]].data


class _ExtractTarget:
    """Owns ``DST.extract.partial`` until `commit`; left without it, everything is removed."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.partial = destination.with_name(destination.name + _PARTIAL)
        self._root = -1
        self._folder = -1  # the one written to last, kept open for the next file
        self._folder_name: bytes | None = None
        self._committed = False

    def __enter__(self) -> Self:
        if os.path.lexists(self.partial):
            self._root = self._lock()  # left by a killed extraction; refuses one that still runs
            self._remove()
        os.mkdir(self.partial, 0o777)  # noqa: PTH102  # one call, where faults are injected
        try:
            self._root = self._lock()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        self._leave_folder()
        if not self._committed:
            self._remove()
        elif self._root >= 0:
            os.close(self._root)

    def make_folder(self, name: bytes) -> None:
        """Make a folder and those above it, and stay in it."""
        if name == self._folder_name:
            return
        self._leave_folder()
        at = os.dup(self._root)
        try:
            for component in name.split(b"/") if name else ():
                with contextlib.suppress(FileExistsError):
                    os.mkdir(component, 0o777, dir_fd=at)
                below = os.open(
                    component,
                    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                    dir_fd=at,
                )
                os.close(at)
                at = below
        except BaseException:
            os.close(at)
            raise
        self._folder, self._folder_name = at, name

    def write(self, name: bytes, body: memoryview, mode: int, mtime_ns: int) -> None:
        """Write one file, which must not be there yet, and the folders above it."""
        folder, _, last = name.rpartition(b"/")
        self.make_folder(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(last, flags, 0o600, dir_fd=self._folder)
        try:
            write_all(descriptor, body)
            os.fchmod(descriptor, mode & _PERMISSIONS)
            os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(descriptor)

    def commit(self) -> None:
        """Sync everything to storage, then rename the folder to its final name."""
        self._leave_folder()
        _sync_file_system(self._root)
        try:
            os.rename(self.partial, self.destination)  # noqa: PTH104  # one call, as above
        except OSError as problem:
            if problem.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _exists(self.destination) from None
            raise
        self._committed = True
        sync_folder(self.destination.parent)

    def _lock(self) -> int:
        """Return a descriptor of the partial folder, locked for this process."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.partial, flags)
        if try_lock(descriptor) is LockOutcome.HELD:
            os.close(descriptor)
            raise UsageError(
                "another process is extracting to this destination",
                where=str(self.partial),
                fix="Wait for it, or choose another destination",
            )
        return descriptor

    def _leave_folder(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
        self._folder, self._folder_name = -1, None

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.partial)
        if self._root >= 0:
            os.close(self._root)
            self._root = -1


def _sync_file_system(descriptor: int) -> None:
    """Have the file system of `descriptor` write all that it holds: one call for all files."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and (
        target.is_symlink() or not target.is_dir() or any(target.iterdir())
    ):
        raise _exists(target)
    if not target.parent.is_dir():
        raise NotFound(
            "no such folder to extract into",
            where=str(target.parent),
            fix=f"Make it first: mkdir -p {target.parent}",
        )


def _exists(target: Path) -> DestinationExists:
    return DestinationExists(
        "the destination exists",
        where=str(target),
        why="it is not an empty folder, and nothing is ever overwritten",
        fix="Choose another destination",
    )


def _unwritable(target: Path, problem: OSError) -> StorageError:
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "the disk is full" if full else "cannot write the extracted files"
    name = problem.filename
    if name is not None:
        shown = name if isinstance(name, (str, bytes, os.PathLike)) else ""
        what += f": {os.fsdecode(shown)!a}" if shown and not full else ""
    return StorageError(
        what,
        where=str(target),
        why=reason(problem),
        fix="Free space or choose another destination; no files were left behind",
    )
