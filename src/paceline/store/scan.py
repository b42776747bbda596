"""What a source folder holds, in the order in which a pack stores it.

The order is bytewise by relative path. A folder sorts as its name with a slash behind it, so that
a depth-first walk yields exactly the order of whole paths: all below one folder is one range.
Sizes and names go into flat arrays, about a hundred bytes a file, never into Python objects.
"""

from __future__ import annotations

import os
import stat
from array import array
from dataclasses import dataclass, field

from paceline.core.errors import NotFound, StorageError, UsageError


@dataclass(slots=True)
class Source:
    """The files and folders below `root`, sorted.

    Attributes:
        root: the folder, as the system spells it.
        names: relative paths of all files, end to end.
        name_offsets: where each begins, and the end.
        lengths: bytes of each file when it was seen.
        labels: position in `classes` of each file's top-level folder; -1 for a file at the root.
        folders: relative paths of all folders, also of empty ones.
        classes: the top-level folders, sorted by name.
    """

    root: bytes
    names: bytearray = field(default_factory=bytearray)
    name_offsets: array[int] = field(default_factory=lambda: array("Q", [0]))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    labels: array[int] = field(default_factory=lambda: array("i"))
    folders: list[bytes] = field(default_factory=list)
    classes: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths)

    def name(self, sample: int) -> bytes:
        """Return the relative path of the `sample`-th file."""
        begin, end = self.name_offsets[sample : sample + 2]
        return bytes(self.names[begin:end])


def scan(root: bytes, *, follow_symlinks: bool) -> Source:
    """Return what lies below `root`.

    Raises:
        NotFound: there is no such folder.
        UsageError: `root` is no folder, or something below is neither file nor folder: a
            symbolic link that was not asked for, one that leads nowhere or back up, a device.
        StorageError: a folder cannot be read.
    """
    source = Source(root)
    try:
        status = os.stat(root)  # noqa: PTH116  # names are bytes here
    except FileNotFoundError:
        raise NotFound(
            "no such folder to pack", where=os.fsdecode(root), fix="Check the path"
        ) from None
    except OSError as problem:
        raise unreadable(root, problem) from problem
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(
            "only a folder can be packed",
            where=os.fsdecode(root),
            why="this is not a folder",
            fix="Name the folder that it lies in",
        )
    # A stack of sorted listings instead of recursion: trees may be deeper than Python's stack.
    ancestors = [(status.st_dev, status.st_ino)]
    stack = [_sorted_entries(root, b"", follow_symlinks=follow_symlinks)]
    # Classes are numbered by their plain names, as every image folder reader does it.
    source.classes = sorted(name[:-1] for name, _, identity in stack[0] if identity is not None)
    label_of = {name: label for label, name in enumerate(source.classes)}
    label = -1
    while stack:
        if not stack[-1]:
            stack.pop()
            ancestors.pop()
            continue
        name, length, identity = stack[-1].pop()
        if identity is None:
            source.names += name
            source.name_offsets.append(len(source.names))
            source.lengths.append(length)
            source.labels.append(label if len(stack) > 1 else -1)
            continue
        if identity in ancestors:
            raise UsageError(
                "a symbolic link leads back to a folder above it",
                where=os.fsdecode(os.path.join(root, name[:-1])),  # noqa: PTH118  # bytes
                fix="Remove the link",
            )
        if len(stack) == 1:
            label = label_of[name[:-1]]
        source.folders.append(name[:-1])
        ancestors.append(identity)
        stack.append(_sorted_entries(root, name, follow_symlinks=follow_symlinks))
    source.folders.sort()
    return source


def unreadable(path: bytes, problem: OSError) -> StorageError:
    """Return the error for a file or folder of the source that the system refuses to read."""
    return StorageError(
        "cannot read the source",
        where=os.fsdecode(path),
        why=problem.strerror or str(problem),
        fix="Make it readable, or move it out of the folder",
    )


def _sorted_entries(
    root: bytes, below: bytes, *, follow_symlinks: bool
) -> list[tuple[bytes, int, tuple[int, int] | None]]:
    """Return path, length and (folders only) identity of the entries of `root`/`below`.

    The last one comes first, and a folder's path ends in a slash.
    """
    folder = root + b"/" + below
    entries: list[tuple[bytes, int, tuple[int, int] | None]] = []
    try:
        with os.scandir(folder) as listing:
            for entry in listing:
                status = _checked_status(entry, follow_symlinks=follow_symlinks)
                if stat.S_ISDIR(status.st_mode):
                    identity = (status.st_dev, status.st_ino)
                    entries.append((below + entry.name + b"/", 0, identity))
                else:
                    entries.append((below + entry.name, status.st_size, None))
    except OSError as problem:
        if isinstance(problem, (UsageError, StorageError)):
            raise
        raise unreadable(folder, problem) from problem
    entries.sort(key=lambda entry: entry[0], reverse=True)
    return entries


def _checked_status(entry: os.DirEntry[bytes], *, follow_symlinks: bool) -> os.stat_result:
    where = os.fsdecode(entry.path)
    if entry.is_symlink():
        if not follow_symlinks:
            raise UsageError(
                "the source holds a symbolic link",
                where=where,
                why="a pack stores contents, and a link may lead anywhere",
                fix="Pack what it leads to with --follow-symlinks, or remove it",
            )
        try:
            status = entry.stat()
        except OSError as problem:  # leads nowhere, or in a circle
            raise UsageError(
                "a symbolic link leads nowhere",
                where=where,
                why=problem.strerror or str(problem),
                fix="Remove the link",
            ) from problem
    else:
        status = entry.stat(follow_symlinks=False)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise UsageError(
            "the source holds something that is neither a file nor a folder",
            where=where,
            why=f"it is a {_kind(status.st_mode)}",
            fix="Move it out of the folder",
        )
    return status


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"
