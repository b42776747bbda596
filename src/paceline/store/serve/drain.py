"""Copies what programs wrote to local storage to the shared file system, in the background.

::

    tree/    what is published (native/posix/outputs.c): a name is there once its file is closed
      |  step: what is new, changed, renamed or gone since the last one?
      v
    TARGET   a file is written under a hidden name, synced, and renamed: all of it or nothing

    room     how many bytes may wait: programs add what they publish, `step` says what is settled

A file is known by its inode, size and time. So one that was renamed after it was drained, as when
checkpoints rotate, is renamed in the target and not copied again. What the target had before is in
the tree as symbolic links to it, which programs see as files.

Below a mount point whose file system is not there nothing is made: the device of the target is
known from its beginning, and while another is at its path all is kept, until it is back.

A step compares the tree with what was drained. It needs no journal: a server that is started again
goes on with the next step, and at the end one step more says whether anything is left.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LOG = logging.getLogger(__name__)
HIDDEN = ".paceline-"  # of native/posix/outputs.c
TREE, ROOM, TARGET = "tree", "room", "target"  # TARGET: text, the path of the target
_PLACE = "place"  # text: device and inode of the target
_PIECE_BYTES = 8 << 20
_FOLLOW_S = 5.0  # for links of other nodes to follow a rename


class DrainRoom:
    """The memory in which programs and the drain count bytes (outputs.c: struct DrainRoom).

    Args:
        path: of the file.
        most_bytes: that may wait to be drained; 0: any number. None: the file is there already.
        wait_s: of a program's close, for room.
    """

    def __init__(self, path: Path, most_bytes: int | None = None, wait_s: float = 0.0) -> None:
        if most_bytes is not None:
            fields = np.array([0, 0, most_bytes, int(wait_s * 1000)], np.uint64)
            path.write_bytes(fields.tobytes())
        with path.open("r+b") as file:
            self._fields = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint64)

    @property
    def published_bytes(self) -> int:
        """All that programs published so far."""
        return int(self._fields[0])

    @property
    def settled_bytes(self) -> int:
        """Of these, what does not wait any more."""
        return int(self._fields[1])

    @settled_bytes.setter
    def settled_bytes(self, count: int) -> None:
        self._fields[1] = count


class FileState(NamedTuple):
    """By which a file of the tree is known to be the one that was drained."""

    inode: int
    size: int
    mtime_ns: int
    mode: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """Return that of a file."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, stat.S_IMODE(found.st_mode))


@dataclass(kw_only=True, slots=True)
class DrainCounts:
    """What was drained so far."""

    files: int = 0
    bytes: int = 0
    renamed: int = 0
    removed: int = 0


class Drain:
    """The drain of one output.

    Args:
        folder: with the tree and the room.
        target: folder of the shared file system.
        room: of the folder.
        keeps_later: whether a file of the target that is later than that of the tree stays.
        leads: whether this node renames what the target had before, of several with one target.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        room: DrainRoom,
        *,
        keeps_later: bool = False,
        leads: bool = True,
    ) -> None:
        self.counts = DrainCounts()
        self.problems: dict[str, OSError] = {}  # by path: why it is not drained
        self._tree = folder / TREE
        self._place = folder / _PLACE
        self._device = self._inode = -1  # of the target; -1: not known
        self._is_lost = False
        self._target = target
        self._room = room
        self._keeps_later = keeps_later
        self._leads = leads
        self._renamed: list[tuple[Path, int, float]] = []  # old name, inode, when
        self._drained: dict[str, FileState] = {}
        self._folders: set[str] = set()
        self._elsewhere: set[str] = set()  # names of files that other nodes wrote

    def begin(self) -> None:
        """Make the tree, with what the target has already.

        Raises:
            OSError: one of both cannot be read or written.
        """
        if self._tree.exists():  # of a drain that was killed
            return
        self._target.mkdir(parents=True, exist_ok=True)
        found = self._target.stat()
        self._place.write_text(f"{found.st_dev} {found.st_ino}")
        begun = self._tree.with_name(f"{TREE}-begun")
        begun.mkdir(exist_ok=True)
        for name, entry in walk(self._target, hidden=True):
            place = begun / name
            if entry.name.startswith(HIDDEN):
                _remove_unlocked(self._target / name)  # of a drain that was killed
            elif entry.is_dir(follow_symlinks=False):
                place.mkdir(exist_ok=True)
            elif entry.is_file() and not place.is_symlink():
                place.symlink_to(self._target / name)
        begun.rename(self._tree)

    def step(self) -> int:
        """Bring the target up to date; return how many files are left to copy, or were not copied.

        Raises:
            OSError: the tree cannot be read.
        """
        published_bytes = self._room.published_bytes
        try:
            self._require_target()
        except OSError as problem:
            return self._keep_all(problem)
        if self._is_lost:
            self._is_lost = False
            self.problems.clear()
            _LOG.warning("%s is back: what was kept is drained", self._target)
        folders, files = self._look()
        self._make_folders(folders)
        self._rename(files)
        left = {
            name: state
            for name, state in files.items()
            if self._drained.get(name) != state and not self._is_in_target(name, state)
        }
        waiting_bytes = sum(state.size for state in left.values())
        self._settle(published_bytes - waiting_bytes)
        copied = [self._copy(name, state) for name, state in left.items()]
        self._remove(folders, files)
        self._remove_renamed(_FOLLOW_S)
        for name in self.problems.keys() - left.keys():
            del self.problems[name]
        return len(copied) - sum(copied)

    def remove_stale(self) -> None:
        """Remove what writers left that were killed before they closed a file."""
        for name, entry in walk(self._tree, hidden=True):
            if entry.name.startswith(HIDDEN):
                _remove_unlocked(self._tree / name)

    def _require_target(self) -> None:
        """Raise if what is at the target's path is not of the target's file system.

        A folder that was removed is of it if the one above is. A file system that was mounted anew
        may have another device; then the folder has its inode.
        """
        if self._device < 0 and self._place.exists():
            self._device, self._inode = map(int, self._place.read_text().split())
        place, found = self._target, None
        while found is None:
            try:
                found = place.stat()
            except FileNotFoundError:
                place = place.parent
        if self._device in (-1, found.st_dev):
            return
        if place == self._target and found.st_ino == self._inode:
            self._device = found.st_dev
            return
        raise OSError(errno.ENODEV, "its file system is not mounted any more", str(self._target))

    def _keep_all(self, problem: OSError) -> int:
        """Note that files cannot be drained now; return how many wait."""
        if not self._is_lost:
            self._is_lost = True
            _LOG.error(
                "%s is lost (%s): what is written is kept below %s until it is back",
                self._target,
                problem.strerror or problem,
                self._tree,
            )
        for name, entry in walk(self._tree):
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    state = FileState.of(entry.stat(follow_symlinks=False))
                    if self._drained.get(name) != state:
                        self.problems[name] = problem
        return len(self.problems)

    def _look(self) -> tuple[set[str], dict[str, FileState]]:
        """Return the folders and files of the tree; links to the target lead to where they should.

        What is renamed while this looks is seen by the next step.
        """
        folders, files, elsewhere = set(), {}, set()
        for name, entry in walk(self._tree):
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    folders.add(name)
                elif entry.is_symlink():
                    if not self._is_of_target(name):
                        elsewhere.add(name)
                        continue
                    self._follow(name)
                    files[name] = FileState.of(entry.stat())
                    self._drained[name] = files[name]
                elif entry.is_file():
                    files[name] = FileState.of(entry.stat())
        self._elsewhere = elsewhere
        return folders, files

    def _is_of_target(self, name: str) -> bool:
        return (self._tree / name).readlink().is_relative_to(self._target)

    def _follow(self, name: str) -> None:
        """Give a file of the target the name that a program gave to the link to it."""
        link, wanted = self._tree / name, self._target / name
        current = link.readlink()
        if current == wanted:
            return
        found = current.stat()
        if self._leads:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            wanted.unlink(missing_ok=True)
            wanted.hardlink_to(current)
            self._renamed.append((current, found.st_ino, time.monotonic()))
            self.counts.renamed += 1
        elif not wanted.exists() or wanted.stat().st_ino != found.st_ino:
            return  # until the node that leads has renamed it
        fresh = link.with_name(f"{HIDDEN}link-{link.name}"[:255])
        fresh.symlink_to(wanted)
        fresh.rename(link)

    def _remove_renamed(self, age_s: float) -> None:
        """Remove old names once the links of all nodes have followed."""
        due_s = time.monotonic() - age_s
        for current, inode, at_s in self._renamed:
            with suppress(OSError):
                if at_s <= due_s and current.lstat().st_ino == inode:
                    current.unlink()
        self._renamed = [renamed for renamed in self._renamed if renamed[2] > due_s]

    def _is_in_target(self, name: str, state: FileState) -> bool:
        """Return whether a drain before this one has copied a file."""
        if name in self._drained:
            return False
        try:
            found = (self._target / name).lstat()
        except OSError:
            return False
        is_later = self._keeps_later and found.st_mtime_ns > state.mtime_ns
        if not is_later and (found.st_size, found.st_mtime_ns) != (state.size, state.mtime_ns):
            return False
        self._drained[name] = state
        return True

    def _has_drained(self, name: str) -> bool:
        """Return whether a file of the target is the one that was drained from here."""
        state = self._drained[name]
        try:
            found = (self._target / name).lstat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (state.size, state.mtime_ns)

    def verify(self) -> None:
        """Have the next step copy again what the target has lost or has otherwise."""
        self._remove_renamed(0.0)
        for name in [name for name in self._drained if not self._has_drained(name)]:
            if not (self._tree / name).is_symlink():
                del self._drained[name]

    def _make_folders(self, folders: set[str]) -> None:
        for name in sorted(folders - self._folders):
            with self._noted(name):
                self._require_target()
                (self._target / name).mkdir(parents=True, exist_ok=True)
                self._folders.add(name)

    def _rename(self, files: dict[str, FileState]) -> None:
        """Rename in the target what was drained under a name that is no longer there."""
        gone = {
            state: name
            for name, state in self._drained.items()
            if name not in files or files[name].inode != state.inode
        }
        for name, state in files.items():
            before = gone.get(state)
            if before is None or self._drained.get(name) == state:
                continue
            if not self._has_drained(before):  # another node's file has the name by now
                continue
            with self._noted(name):
                (self._target / before).replace(self._target / name)
                del self._drained[before]
                del gone[state]
                self._drained[name] = state
                self.counts.renamed += 1

    def _copy(self, name: str, state: FileState) -> bool:
        """Copy one file; return whether it is drained, or was replaced in the meantime."""
        target = self._target / name
        partial = target.with_name(f"{HIDDEN}{target.name}"[:255])
        with self._noted(name):
            try:
                self._require_target()
                self._write(self._tree / name, partial, state)
                if FileState.of((self._tree / name).lstat()) == state:
                    partial.replace(target)
                    _sync(target.parent)
                    self._drained[name] = state
                    self.counts.files += 1
                    self.counts.bytes += state.size
            except FileNotFoundError:  # the next step sees what became of it
                if (self._tree / name).exists():
                    raise
            finally:
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
            self._settle(self._room.settled_bytes + state.size)
            return True
        return False

    def _write(self, source: Path, partial: Path, state: FileState) -> None:
        """Write a copy and sync it.

        The source is closed before that: what a program removes takes room as long as it is open.
        """
        with ExitStack() as stack:
            with source.open("rb", buffering=0) as file:
                partial.parent.mkdir(parents=True, exist_ok=True)
                copy = stack.enter_context(partial.open("wb", buffering=0))
                with suppress(OSError):  # where there are no locks; the next step copies again
                    fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
                done = 0
                while count := os.sendfile(copy.fileno(), file.fileno(), done, _PIECE_BYTES):
                    done += count
            os.fchmod(copy.fileno(), state.mode)
            os.utime(copy.fileno(), ns=(state.mtime_ns, state.mtime_ns))
            os.fsync(copy.fileno())

    def _remove(self, folders: set[str], files: dict[str, FileState]) -> None:
        """Remove from the target what programs removed, once all that is new is there."""
        if self.problems:
            return
        for name in [name for name in self._drained if name not in files]:
            with self._noted(name):
                if name not in self._elsewhere and self._has_drained(name):
                    (self._target / name).unlink(missing_ok=True)
                    self.counts.removed += 1
                del self._drained[name]
        for name in sorted(self._folders - folders, reverse=True):
            with suppress(OSError):  # others may have put files there
                (self._target / name).rmdir()
            self._folders.discard(name)

    def _settle(self, count: int) -> None:
        self._room.settled_bytes = max(0, min(count, self._room.published_bytes))

    def _noted(self, name: str) -> _Noted:
        return _Noted(self.problems, name, self._target / name)


class _Noted:
    """Keeps the problem with one path, and says it the first time."""

    def __init__(self, problems: dict[str, OSError], name: str, path: Path) -> None:
        self._problems = problems
        self._name = name
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: object
    ) -> bool:
        if problem is None:
            self._problems.pop(self._name, None)
            return False
        if not isinstance(problem, OSError):
            return False
        if self._name not in self._problems:
            _LOG.warning("%s is not drained yet: %s", self._path, problem.strerror or problem)
        self._problems[self._name] = problem
        return True


def drain_error(target: str, folder: str, problems: dict[str, str]) -> StorageError:
    """Return the error of a drain that is over, with files that were not drained."""
    name, why = next(iter(sorted(problems.items())))
    others = f", and {len(problems) - 1} more files" if len(problems) > 1 else ""
    return StorageError(
        "a file that the run wrote could not be drained",
        where=f"{target}/{name}{others}",
        why=why,
        fix=f"It is kept below {folder}/{TREE}: copy it from there, then remove {folder}",
    )


def walk(top: Path, *, hidden: bool = False) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what is below a folder, by its path from there; a folder before what is in it."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with suppress(FileNotFoundError), os.scandir(top / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith(HIDDEN) and not hidden:
                    continue
                yield name, entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name)


def _remove_unlocked(path: Path) -> None:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    with suppress(OSError):
        try:
            file = os.open(path, os.O_RDWR | flags)  # NFS locks such alone
        except PermissionError:
            file = os.open(path, os.O_RDONLY | flags)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file).st_ino:
                path.unlink()
        finally:
            os.close(file)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
