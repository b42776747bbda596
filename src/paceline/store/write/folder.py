"""What a source folder holds, in the order in which a pack stores it.

The order is bytewise by relative path. A folder sorts as its name with a slash behind it, so that
a depth-first walk yields exactly the order of whole paths: all below one folder is one range.
The listing goes to a temporary file as columns, so its length does not matter; files are read
later, in batches, and must then be what the listing says.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import NotFound, StorageError, UsageError
from paceline.native import list_folder, read_files
from paceline.store.write.shards import BATCH_BYTES
from paceline.store.write.sorted_runs import SAMPLE_TYPES, Samples, joined_samples, part_of
from paceline.store.write.sources import (
    BATCH_SAMPLES,
    MAX_NAME_BYTES,
    Batch,
    Totals,
    aligned_begins,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMORY_BYTES = 64 << 20
_PART_SAMPLES = 1 << 16
_READERS = 4  # threads: a file system at a distance answers several requests at a time


class FolderSource:
    """The files and folders below `root`; closing it lets go of the folder.

    Args:
        root: the folder, as the system spells it.
        follow_symlinks: take what links lead to, instead of refusing them.

    Raises:
        NotFound: there is no such folder.
        UsageError: `root` is no folder, or something below is neither file nor folder: a
            symbolic link that was not asked for, one that leads nowhere or back up, a device.
        StorageError: a folder cannot be read.
    """

    kind = "folder"

    def __init__(self, root: bytes, *, follow_symlinks: bool) -> None:
        self.where = os.fsdecode(root)
        self.root = root
        self.follow = follow_symlinks
        self.descriptor = _open_root(root)
        self._listing: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115
        self._parts: list[tuple[int, int]] = []  # samples and bytes of names of each part
        self._pending: list[tuple[Samples, NDArray[np.uint64]]] = []
        self._pending_count = 0
        self._folders: list[bytes] = []
        self._classes: list[bytes] = []
        self._totals = Totals(is_exact=True)
        try:
            self._scan()
            self._write_part()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the folder and of the listing."""
        self._listing.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def totals(self) -> Totals:
        """Return how many files there are, and their bytes."""
        return self._totals

    def folders(self) -> list[bytes]:
        """Return the relative paths of all folders, also of empty ones."""
        return self._folders

    def classes(self) -> tuple[list[bytes], None]:
        """Return the top-level folders, sorted; labels count them."""
        return self._classes, None

    def batches(self, large_bytes: int) -> Iterator[Batch]:
        """Yield all files, in order; one that is larger than `large_bytes` comes alone."""
        for samples, lengths in self._listed():
            ends = aligned_begins(lengths)[1:]
            alone = np.append(np.flatnonzero(lengths > large_bytes), len(lengths))
            first = 0
            while first < len(lengths):
                before = int(ends[first - 1]) if first else 0
                end = int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
                next_alone = int(alone[np.searchsorted(alone, first)])
                end = max(min(end, first + BATCH_SAMPLES, next_alone), first + 1)
                part = slice(first, end)
                names = part_of(samples, part)
                yield Batch(names, lengths[part], _Files(self, names, lengths[part]))
                first = end

    def _listed(self) -> Iterator[tuple[Samples, NDArray[np.uint64]]]:
        self._listing.seek(0)
        position = 0
        for count, name_bytes in self._parts:
            self._listing.seek(position)

            def column(dtype: str, size: int) -> NDArray[Any]:
                return np.frombuffer(self._listing.read(size * np.dtype(dtype).itemsize), dtype)

            offsets = column("<u8", count + 1)
            names = column("u1", name_bytes)
            lengths = column("<u8", count)
            rest = {name: column(dtype, count) for name, dtype in SAMPLE_TYPES.items()}
            position = self._listing.tell()
            yield Samples(names=names, name_offsets=offsets, **rest), lengths

    def _scan(self) -> None:
        status = os.fstat(self.descriptor)
        ancestors = [(status.st_dev, status.st_ino)]
        root = _Listing(self.root, self.descriptor, b"", follow=self.follow)
        # Classes are numbered by their plain names, as every image folder reader does it.
        self._classes = sorted(name[:-1] for name in root.folder_names())
        label_of = {name: label for label, name in enumerate(self._classes)}
        # A stack of sorted listings instead of recursion: trees may be deeper than Python's stack.
        stack = [root]
        label = -1
        while stack:
            listing = stack[-1]
            self._note(listing, label if len(stack) > 1 else -1)
            below = listing.enter()
            if below is None:
                stack.pop()
                ancestors.pop()
                continue
            name, identity = below
            if identity in ancestors:
                raise UsageError(
                    "a symbolic link leads back to a folder above it",
                    where=os.fsdecode(self.root + b"/" + name[:-1]),
                    fix="Remove the link",
                )
            if len(stack) == 1:
                label = label_of[name[:-1]]
            self._folders.append(name[:-1])
            ancestors.append(identity)
            descriptor = _open_folder(self.root, self.descriptor, name, follow=self.follow)
            try:
                stack.append(_Listing(self.root, descriptor, name, follow=self.follow))
            finally:
                os.close(descriptor)

    def _note(self, listing: _Listing, label: int) -> None:
        """Append the files of `listing` up to its next folder."""
        first, end = listing.files()
        if first == end:
            return
        offsets = listing.columns.offsets[first : end + 1]
        names = listing.columns.names[int(offsets[0]) : int(offsets[-1])]
        count = end - first
        lengths = listing.columns.sizes[first:end]
        samples = Samples(
            names=np.frombuffer(names, np.uint8),
            name_offsets=offsets - offsets[0],
            labels=np.full(count, label, np.int32),
            modes=listing.columns.modes[first:end],
            mtimes_ns=listing.columns.mtimes_ns[first:end],
            extent_counts=np.ones(count, np.uint32),
        )
        self._pending.append((samples, lengths))
        self._pending_count += count
        if self._pending_count >= _PART_SAMPLES:
            self._write_part()
        self._totals = Totals(
            sample_count=self._totals.sample_count + count,
            byte_count=self._totals.byte_count + int(lengths.sum()),
            is_exact=True,
        )

    def _write_part(self) -> None:
        if not self._pending:
            return
        samples = joined_samples([one for one, _ in self._pending])
        lengths = np.concatenate([one for _, one in self._pending])
        columns = [samples.name_offsets, samples.names, lengths]
        for column in (*columns, *(getattr(samples, name) for name in SAMPLE_TYPES)):
            self._listing.write(column.tobytes())
        self._parts.append((len(samples), len(samples.names)))
        self._pending.clear()
        self._pending_count = 0


class _Listing:
    """The entries of one folder, sorted, and how far a walk has come in them."""

    def __init__(self, root: bytes, descriptor: int, below: bytes, *, follow: bool) -> None:
        try:
            listing = list_folder(descriptor, below, follow=follow)
        except OSError as problem:
            raise unreadable(root + b"/" + below, problem) from problem
        self.columns = listing
        self._check(root, follow=follow)
        kinds = listing.modes & 0o170000
        self._folders = np.flatnonzero(kinds == stat.S_IFDIR).tolist()
        self._next = 0  # entry
        self._turn = 0  # folder

    def folder_names(self) -> list[bytes]:
        """Return the names of the folders, each with a slash behind it."""
        return [self.name(k) for k in self._folders]

    def name(self, entry: int) -> bytes:
        """Return the relative path of an entry."""
        return self.columns.names[
            int(self.columns.offsets[entry]) : int(self.columns.offsets[entry + 1])
        ]

    def files(self) -> tuple[int, int]:
        """Return the range of files before the next folder."""
        end = (
            self._folders[self._turn]
            if self._turn < len(self._folders)
            else len(self.columns.modes)
        )
        return self._next, end

    def enter(self) -> tuple[bytes, tuple[int, int]] | None:
        """Go on behind the next folder and return its path and identity; None at the end."""
        if self._turn == len(self._folders):
            self._next = len(self.columns.modes)
            return None
        entry = self._folders[self._turn]
        self._turn += 1
        self._next = entry + 1
        return self.name(entry), (int(self.columns.devices[entry]), int(self.columns.inodes[entry]))

    def _check(self, root: bytes, *, follow: bool) -> None:
        errors, links = self.columns.errors, self.columns.links
        kinds = self.columns.modes & 0o170000
        fine = (kinds == stat.S_IFREG) | (kinds == stat.S_IFDIR)
        bad = np.flatnonzero(~fine | (errors != 0))
        if len(bad):
            entry = int(bad[0])
            path = root + b"/" + self.name(entry)
            if errors[entry] or links[entry]:
                raise _bad_entry(
                    path, int(errors[entry]), is_link=bool(links[entry]), follow=follow
                )
            raise UsageError(
                "the source holds something that is neither a file nor a folder",
                where=os.fsdecode(path),
                why=f"it is a {_kind(int(self.columns.modes[entry]))}",
                fix="Move it out of the folder",
            )
        lengths = np.diff(self.columns.offsets)
        if len(lengths) and int(lengths.max()) > MAX_NAME_BYTES:
            raise UsageError(
                f"a path is longer than {MAX_NAME_BYTES:,} bytes",
                where=os.fsdecode(self.name(int(lengths.argmax()))[:200]) + "...",
                why="so much is what a system call takes",
                fix="Pack from further down, or shorten the names",
            )


@dataclass(slots=True)
class _Files:
    """The bytes of files of a folder."""

    source: FolderSource
    samples: Samples
    lengths: NDArray[np.uint64]
    descriptor: int = -1
    position: int = 0

    def fill(self, target: NDArray[np.uint8], begins: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Read the files to their places in `target`, zero the rest; return checksums."""
        source, samples = self.source, self.samples
        read = read_files(
            source.descriptor,
            (samples.name_offsets, samples.names),
            self.lengths,
            samples.mtimes_ns,
            begins[:-1],
            target,
            follow=source.follow,
            threads=_READERS,
        )
        if read.problem is not None:
            problem = read.problem
            sizes = (int(self.lengths[problem.number]), problem.size)
            raise self._problem(self._path(problem.number), problem.outcome, problem.error, sizes)
        return read.checksums

    def read_into(self, target: NDArray[np.uint8]) -> int:
        """Read what comes next of the one large file; return how many bytes that is."""
        path = self._path(0)
        length = int(self.lengths[0])
        try:
            if self.descriptor < 0:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                if not self.source.follow:
                    flags |= os.O_NOFOLLOW
                self.descriptor = os.open(path, flags)
                self._check(path)
            count = os.readv(self.descriptor, [target.data])
            if count == 0:
                raise self._problem(path, "resized", 0, (length, self.position))
            self.position += count
            if self.position == length:
                self._check(path)
                self.close()
        except OSError as problem:
            self.close()
            if isinstance(problem, StorageError):
                raise
            raise self._problem(path, "unreadable", problem.errno or 0, (0, 0)) from problem
        return count

    def drop(self, count: int) -> _Files:
        """Return all but the first `count` files."""
        return _Files(self.source, part_of(self.samples, slice(count, None)), self.lengths[count:])

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _check(self, path: bytes) -> None:
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._problem(path, "no_file", 0, (0, 0))
        if status.st_size != int(self.lengths[0]):
            raise self._problem(path, "resized", 0, (self.lengths[0], status.st_size))
        if status.st_mtime_ns != int(self.samples.mtimes_ns[0]):
            raise self._problem(path, "touched", 0, (0, 0))

    def _path(self, sample: int) -> bytes:
        begin, end = self.samples.name_offsets[sample : sample + 2].tolist()
        return self.source.root + b"/" + self.samples.names[begin:end].tobytes()

    def _problem(
        self, path: bytes, outcome: str, error: int, sizes: tuple[int, int]
    ) -> StorageError:
        if outcome == "unreadable":
            return unreadable(path, OSError(error, os.strerror(error)))
        why = {
            "gone": "it is gone",
            "no_file": "it is no file any more",
            "resized": f"it had {sizes[0]} bytes, then {sizes[1]}",
            "touched": "it was written to",
        }[outcome]
        return StorageError(
            "a source file changed while it was packed",
            where=os.fsdecode(path),
            why=why,
            fix="Pack again when nobody writes to the source",
        )


def unreadable(path: bytes, problem: OSError) -> StorageError:
    """Return the error for a file or folder of the source that the system refuses to read."""
    return StorageError(
        "cannot read the source",
        where=os.fsdecode(path.rstrip(b"/")),
        why=problem.strerror or str(problem),
        fix="Make it readable, or move it out of the folder",
    )


def _open_root(root: bytes) -> int:
    try:
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            "no such folder to pack", where=os.fsdecode(root), fix="Check the path"
        ) from None
    except NotADirectoryError as problem:
        if os.path.lexists(root):
            raise UsageError(
                "only a folder can be packed",
                where=os.fsdecode(root),
                why="this is not a folder",
                fix="Name the folder that it lies in, or a .tar archive",
            ) from None
        raise unreadable(root, problem) from problem
    except OSError as problem:
        raise unreadable(root, problem) from problem


def _open_folder(root: bytes, descriptor: int, name: bytes, *, follow: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        return os.open(name, flags, dir_fd=descriptor)
    except OSError as problem:
        raise unreadable(root + b"/" + name, problem) from problem


def _bad_entry(
    path: bytes, error: int, *, is_link: bool, follow: bool
) -> UsageError | StorageError:
    if not is_link:
        return unreadable(path, OSError(error, os.strerror(error)))
    if follow:
        return UsageError(
            "a symbolic link leads nowhere",
            where=os.fsdecode(path),
            why=os.strerror(error) if error else "it leads to neither a file nor a folder",
            fix="Remove the link",
        )
    return UsageError(
        "the source holds a symbolic link",
        where=os.fsdecode(path),
        why="a pack stores contents, and a link may lead anywhere",
        fix="Pack what it leads to with --follow-symlinks, or remove it",
    )


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"
