"""The names of one output on one node: folders and files that programs see there.

Every node has all names, so that listing and stat ask no one. The bytes of a file lie on the node
that wrote it::

    tree/a                        a file that was written here
    tree/b  ->  copies/NODE-ID    of another node: a file of the same size, time and mode
                empty/NODE-ID     while that file has no bytes: until a program opens it
    tree/c  ->  TARGET/c          was in the shared folder when the run began

Changes come in one order, the same on all nodes (output_node.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from paceline.store.serve.drain import HIDDEN, TREE, walk

COPIES, EMPTY = "copies", "empty"


@dataclass(frozen=True, kw_only=True, slots=True)
class NameChange:
    """A change of names that all nodes make.

    Attributes:
        kind: of change.
        path: below the output; of a rename, the old one.
        to: the new path of a rename.
        node: that wrote a published file: its index.
        identity: of the file on that node.
        size: of the file, in bytes.
        mtime_ns: of the file.
        mode: of a file or new folder; of a rename, not 0 if it replaces nothing.
    """

    kind: Literal["publish", "attributes", "unlink", "rename", "mkdir", "rmdir"]
    path: str
    to: str = ""
    node: int = 0
    identity: str = ""
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as it travels."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return what `to_json` made.

        Raises:
            ValueError: it is no change, or leads out of the output.
        """
        try:
            change = cls(**data)
        except TypeError as problem:
            raise ValueError(str(problem)) from None
        for path in (change.path, change.to):
            check_path(path)
        if "/" in change.identity:
            raise ValueError(change.identity)
        return change


def check_path(path: str) -> None:
    """Check that a path stays within an output.

    Raises:
        ValueError: it does not.
    """
    if path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError(f"not a path of an output: {path!a}")


class OutputNames:
    """The names on this node. One thread changes them at a time.

    Args:
        folder: on local storage.
        node: index of this node.
    """

    def __init__(self, folder: Path, node: int) -> None:
        self._folder = folder
        self._tree = folder / TREE
        self._node = node
        for name in (COPIES, EMPTY):
            (folder / name).mkdir(exist_ok=True)

    def hidden(self, path: str) -> Path:
        """Return where the file of a path is while it is written."""
        place = self._tree / path
        return place.with_name(HIDDEN + place.name)

    def written(self) -> list[str]:
        """Return the paths that programs of this node write now."""
        hidden = [
            Path(name)
            for name, entry in walk(self._tree, hidden=True)
            if entry.name.startswith(HIDDEN)
        ]
        paths = [str(path.with_name(path.name.removeprefix(HIDDEN))) for path in hidden]
        return [path for path in paths if self.is_written(path)]

    def is_written(self, path: str) -> bool:
        """Return whether a program of this node writes a file now."""
        try:
            file = os.open(self.hidden(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    def offer(self, path: str) -> NameChange:
        """Return the change that publishes what was written here.

        Raises:
            OSError: it is not there.
        """
        return self._describe("publish", path, self.hidden(path))

    def attributes(self, path: str) -> NameChange:
        """Return the change that tells other nodes the mode and time of a file that is here.

        Raises:
            OSError: it is not there.
        """
        return self._describe("attributes", path, self._tree / path)

    def _describe(
        self, kind: Literal["publish", "attributes"], path: str, place: Path
    ) -> NameChange:
        found = place.lstat()
        return NameChange(
            kind=kind,
            path=path,
            node=self._node,
            identity=f"{found.st_ino}-{found.st_mtime_ns}",
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            mode=stat.S_IMODE(found.st_mode),
        )

    def is_published_here(self, path: str) -> bool:
        """Return whether a path means a file that was written on this node."""
        try:
            return stat.S_ISREG((self._tree / path).lstat().st_mode)
        except OSError:
            return False

    def open_own(self, path: str, identity: str, size: int) -> int:
        """Return a descriptor of a file that was written here.

        Raises:
            OSError: the path means another file now.
        """
        file = os.open(self._tree / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        found = os.fstat(file)
        if (str(found.st_ino), found.st_size) == (identity.partition("-")[0], size):
            return file
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def check(self, change: NameChange) -> None:
        """Check what the file system itself does not, before the first node makes a change.

        Raises:
            OSError: it is not possible.
        """
        if change.kind == "publish" and (self._tree / change.path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), change.path)
        if change.kind == "publish" and not (self._tree / change.path).parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), change.path)
        is_taken = change.kind == "rename" and change.mode and (self._tree / change.to).exists()
        if is_taken:  # RENAME_NOREPLACE
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), change.to)

    def apply(self, change: NameChange) -> None:
        """Make a change.

        Raises:
            OSError: it is not possible.
        """
        path = self._tree / change.path
        if change.kind == "publish":
            self._publish(path, change)
        elif change.kind == "attributes":
            self._set_attributes(path, change)
        elif change.kind == "unlink":
            before = self._copy(path)
            path.unlink()
            self._forget(before)
        elif change.kind == "rename":
            self._rename(path, self._tree / change.to)
        elif change.kind == "mkdir":
            path.mkdir(mode=change.mode)
            path.chmod(change.mode)
        else:
            self._rmdir(path)

    def _publish(self, path: Path, change: NameChange) -> None:
        before = self._copy(path)
        if change.node == self._node:
            self.hidden(change.path).rename(path)
        else:
            copy = self._folder / COPIES / f"{change.node}-{change.identity}"
            (self._folder / EMPTY / copy.name).touch()
            copy.touch(0o600)
            os.truncate(copy, change.size)
            copy.chmod(change.mode)
            os.utime(copy, ns=(change.mtime_ns, change.mtime_ns))
            self._point(path, copy)
            if before == copy:  # the same change once more, after a server was killed
                return
        self._forget(before)

    def _set_attributes(self, path: Path, change: NameChange) -> None:
        copy = self._copy(path)
        if copy is not None and copy.name.startswith(f"{change.node}-"):
            copy.chmod(change.mode)
            os.utime(copy, ns=(change.mtime_ns, change.mtime_ns))

    def _rename(self, path: Path, to: Path) -> None:
        before = None if _same_file(path, to) else self._copy(to)
        path.rename(to)
        self._forget(before)

    def _rmdir(self, path: Path) -> None:
        entries = list(path.iterdir())
        if not all(entry.name.startswith(HIDDEN) for entry in entries):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        for stale in entries:
            stale.unlink()
        path.rmdir()

    def empty_copy(self, path: str) -> Path | None:
        """Return the copy that a path means and that has no bytes yet; None: its bytes are here.

        Raises:
            OSError: it is not there.
        """
        try:
            copy = (self._tree / path).readlink()
        except OSError as problem:
            if problem.errno == errno.EINVAL:
                return None
            raise
        is_empty = copy.parent == self._folder / COPIES and self._marker(copy).exists()
        return copy if is_empty else None

    def restore(self, copy: Path, wanted: os.stat_result) -> None:
        """Give a copy that was written to its mode and time again."""
        copy.chmod(stat.S_IMODE(wanted.st_mode))
        os.utime(copy, ns=(wanted.st_mtime_ns, wanted.st_mtime_ns))

    def note_filled(self, copy: Path) -> None:
        """Take note that a copy has its bytes."""
        self._marker(copy).unlink(missing_ok=True)

    def _marker(self, copy: Path) -> Path:
        return self._folder / EMPTY / copy.name

    def _point(self, path: Path, copy: Path) -> None:
        """Have a name lead to a file."""
        fresh = path.with_name(f"{HIDDEN}link-{path.name}"[:255])
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(copy)
        fresh.rename(path)

    def _copy(self, path: Path) -> Path | None:
        """Return the copy that a name means, before it means something else."""
        try:
            copy = path.readlink()
        except OSError:
            return None
        return copy if copy.parent == self._folder / COPIES else None

    def _forget(self, copy: Path | None) -> None:
        """Remove a copy that no name means any more. Who has it open keeps it."""
        if copy is not None:
            copy.unlink(missing_ok=True)
            self._marker(copy).unlink(missing_ok=True)


def _same_file(path: Path, other: Path) -> bool:
    try:
        return os.path.samestat(path.lstat(), other.lstat())
    except OSError:
        return False
