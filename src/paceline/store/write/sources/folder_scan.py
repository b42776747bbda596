"""Walks a source folder in the order in which a pack stores it.

The order is bytewise by relative path. A folder sorts as its name with a slash after it, so that
a depth-first walk yields exactly the order of complete paths: all below one folder is one range.
"""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import NotFound, StorageError, UsageError, os_errors_as, reason
from paceline.native import FolderListing, list_folder
from paceline.store.format.layout import SIDE_SUFFIX, is_of_side_file, joined
from paceline.store.write.columns import SampleColumns
from paceline.store.write.sources.source import MAX_NAME_BYTES, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from paceline.store.write.sources.source import Symlinks


class FolderScan:
    """A walk over the folder `root`.

    Args:
        root: the folder, as the system spells it.
        descriptor: open descriptor of the folder.
        symlinks: refuse symbolic links, follow them, or skip them with all that is no file.
        skips_side_files: pass over the indexes of data in place.

    Attributes:
        folders: relative paths of the folders that were entered, also of empty ones.
        classes: the top-level folders, sorted.
    """

    def __init__(
        self,
        root: bytes,
        descriptor: int,
        symlinks: Symlinks,
        *,
        skips_side_files: bool = False,
    ) -> None:
        self.folders: list[bytes] = []
        self.classes: list[bytes] = []
        self._root = root
        self._descriptor = descriptor
        self._follow = symlinks == "follow"
        self._skips = symlinks == "skip"
        self._skipped = Skipped(os.fsdecode(root))
        self._skips_side_files = skips_side_files

    def files(self) -> Iterator[tuple[SampleColumns, NDArray[np.uint64]]]:
        """Yield columns and lengths of files that follow each other.

        Raises:
            UsageError: something is neither file nor folder: a symbolic link that was not asked
                for, one that leads nowhere or back up, a device.
            StorageError: a folder cannot be read.
        """
        status = os.fstat(self._descriptor)
        ancestors = [(status.st_dev, status.st_ino)]
        top = self._list(self._descriptor, b"")
        # Classes are numbered by their plain names, as every image folder reader does it.
        self.classes = sorted(name[:-1] for name in top.folder_names())
        label_of = {name: label for label, name in enumerate(self.classes)}
        # A stack of sorted listings instead of recursion: trees may be deeper than Python's stack.
        stack = [top]
        label = -1
        while stack:
            listing = stack[-1]
            if listing.file_count:
                yield listing.next_files(label if len(stack) > 1 else -1)
            below = listing.enter()
            if below is None:
                stack.pop()
                ancestors.pop()
                continue
            name, identity = below
            if identity in ancestors:
                raise UsageError(
                    "a symbolic link leads back to a folder above it",
                    where=os.fsdecode(self._root + b"/" + name[:-1]),
                    fix="Remove the link",
                )
            if len(stack) == 1:
                label = label_of[name[:-1]]
            self.folders.append(name[:-1])
            ancestors.append(identity)
            descriptor = self._open(name)
            try:
                stack.append(self._list(descriptor, name))
            finally:
                os.close(descriptor)
        self._skipped.tell()

    def _list(self, descriptor: int, below: bytes) -> SortedListing:
        with os_errors_as(lambda problem: unreadable(self._root + b"/" + below, problem)):
            columns = list_folder(descriptor, below, follow=self._follow)
        if self._skips_side_files and SIDE_SUFFIX.encode() in columns.names:
            columns = _without_side_files(columns, len(below))
        if self._skips:
            columns = self._without_others(columns)
        return SortedListing(self._root, columns, follow=self._follow)

    def _without_others(self, columns: FolderListing) -> FolderListing:
        kinds = columns.modes & 0o170000
        is_other = (kinds != stat.S_IFREG) & (kinds != stat.S_IFDIR) & (columns.errors == 0)
        for entry in np.flatnonzero(is_other).tolist():
            self._skipped.add(columns.names[slice(*columns.offsets[entry : entry + 2].tolist())])
        return _kept(columns, np.flatnonzero(~is_other).tolist()) if is_other.any() else columns

    def _open(self, name: bytes) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        flags |= 0 if self._follow else os.O_NOFOLLOW
        with os_errors_as(lambda problem: unreadable(self._root + b"/" + name, problem)):
            return os.open(name, flags, dir_fd=self._descriptor)


class SortedListing:
    """The entries of one folder, sorted, and how far a walk has come in them."""

    def __init__(self, root: bytes, columns: FolderListing, *, follow: bool) -> None:
        self._columns = columns
        self._check(root, follow=follow)
        kinds = self._columns.modes & 0o170000
        self._folders = np.flatnonzero(kinds == stat.S_IFDIR).tolist()
        self._next = 0  # the entry to go on with
        self._entered = 0  # folders

    @property
    def file_count(self) -> int:
        """How many files come before the next folder."""
        return self._end - self._next

    @property
    def _end(self) -> int:
        if self._entered < len(self._folders):
            return int(self._folders[self._entered])
        return len(self._columns.modes)

    def folder_names(self) -> list[bytes]:
        """Return the names of the folders, each with a slash at its end."""
        return [self._name(entry) for entry in self._folders]

    def next_files(self, label: int) -> tuple[SampleColumns, NDArray[np.uint64]]:
        """Return columns and lengths of the files before the next folder."""
        first, end, columns = self._next, self._end, self._columns
        offsets = columns.offsets[first : end + 1]
        samples = SampleColumns(
            names=np.frombuffer(columns.names[int(offsets[0]) : int(offsets[-1])], np.uint8),
            name_offsets=offsets - offsets[0],
            labels=np.full(end - first, label, np.int32),
            modes=columns.modes[first:end],
            mtimes_ns=columns.mtimes_ns[first:end],
            extent_counts=np.ones(end - first, np.uint32),
        )
        return samples, columns.sizes[first:end]

    def enter(self) -> tuple[bytes, tuple[int, int]] | None:
        """Pass the next folder and return its path and identity; None at the end."""
        if self._entered == len(self._folders):
            return None
        entry = self._folders[self._entered]
        self._entered += 1
        self._next = entry + 1
        identity = (int(self._columns.devices[entry]), int(self._columns.inodes[entry]))
        return self._name(entry), identity

    def _name(self, entry: int) -> bytes:
        begin, end = self._columns.offsets[entry : entry + 2].tolist()
        return self._columns.names[begin:end]

    def _check(self, root: bytes, *, follow: bool) -> None:
        errors, links = self._columns.errors, self._columns.links
        kinds = self._columns.modes & 0o170000
        fine = (kinds == stat.S_IFREG) | (kinds == stat.S_IFDIR)
        bad = np.flatnonzero(~fine | (errors != 0))
        if len(bad):
            entry = int(bad[0])
            path = root + b"/" + self._name(entry)
            if errors[entry] or links[entry]:
                raise _bad_entry(
                    path, int(errors[entry]), is_link=bool(links[entry]), follow=follow
                )
            raise UsageError(
                "the source holds something that is neither a file nor a folder",
                where=os.fsdecode(path),
                why=f"it is a {_kind(int(self._columns.modes[entry]))}",
                fix="Move it out of the folder, or pack with --symlinks skip",
            )
        lengths = np.diff(self._columns.offsets)
        if len(lengths) and int(lengths.max()) > MAX_NAME_BYTES:
            raise UsageError(
                f"a path is longer than {MAX_NAME_BYTES:,} bytes",
                where=os.fsdecode(self._name(int(lengths.argmax()))[:200]) + "...",
                why="PATH_MAX of the kernel is 4,096 bytes, with the final NUL",
                fix="Pack a folder further down in the tree, or shorten the names",
            )


def _without_side_files(columns: FolderListing, prefix_bytes: int) -> FolderListing:
    """Return the other entries of a listing, in which each name follows a prefix."""
    names = [columns.names[begin:end] for begin, end in pairwise(columns.offsets.tolist())]
    own_names = [os.fsdecode(name[prefix_bytes:]) for name in names]
    return _kept(columns, [k for k, name in enumerate(own_names) if not is_of_side_file(name)])


def _kept(columns: FolderListing, kept: list[int]) -> FolderListing:
    """Return the entries with some numbers."""
    names = [columns.names[begin:end] for begin, end in pairwise(columns.offsets.tolist())]
    offsets, blob = joined(names[k] for k in kept)
    return FolderListing(
        blob,
        offsets,
        columns.modes[kept],
        columns.sizes[kept],
        columns.mtimes_ns[kept],
        columns.devices[kept],
        columns.inodes[kept],
        columns.errors[kept],
        columns.links[kept],
    )


def unreadable(path: bytes, problem: OSError) -> StorageError:
    """Return the error for a file or folder of the source that the system refuses to read."""
    return StorageError(
        "cannot read the source",
        where=os.fsdecode(path.rstrip(b"/")),
        why=reason(problem),
        fix="Make it readable, or move it out of the folder",
    )


def open_root(root: bytes) -> int:
    """Return a descriptor of the folder to pack.

    Raises:
        NotFound: there is nothing.
        UsageError: it is not a folder.
        StorageError: it cannot be read.
    """
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
                fix="Give the folder that contains the file, or a .tar archive",
            ) from None
        raise unreadable(root, problem) from problem
    except OSError as problem:
        raise unreadable(root, problem) from problem


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
        fix="Pack with --symlinks follow, or --symlinks skip, or remove the link",
    )


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"
