"""An unfinished pack: the folder DST.partial, which one rename turns into the pack DST.

::

    DST.partial/   mkdir, lock             a killed `pack` leaves this; readers refuse its name,
        shards, index: write, fsync        and the next `pack` resumes or replaces it
        fsync the folder
    DST/           rename, fsync parent    from here on the pack is complete

The folder is locked (`files.py`), and only files of a pack are ever removed.
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
    reason,
)
from paceline.core.files import sync_folder
from paceline.store.format.layout import PARTIAL_SUFFIX, UNFINISHED
from paceline.store.write.files import PackFolder, not_ours

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_OURS = re.compile(r"index\.pace|(shard|parity)-\d{5,}\.pace|" + UNFINISHED.pattern)


class PartialPack(PackFolder):
    """Owns ``DST.partial`` until `commit`.

    Leaving the context without `commit` removes everything, unless `resumable` says that the next
    `pack` can resume from durable shards.
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
                    raise not_ours(self.folder, why)
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
        # A source that cannot be packed fails the next time as well: nothing is worth keeping.
        is_kept = self.resumable and not isinstance(problem, UsageError)
        if self._lock >= 0 and not is_kept and self._is_in_place():  # not committed
            with contextlib.suppress(OSError, PacelineError):
                self.remove(self.names())
                self.folder.rmdir()
        self.unlock()

    def commit(self) -> None:
        """Turn the partial pack into the pack.

        Raises:
            DestinationExists: another program has made the destination since; it is untouched.
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
        """Return whether the rename is still to come: an interrupt may come right after it."""
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
        DestinationExists: the destination exists.
        UsageError: the destination lies inside `source`, or is named like an unfinished pack.
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
            why="the pack would contain itself",
            fix="Choose a destination outside " + str(source),
        )


def unwritable(path: Path, problem: OSError, *, kept: bool = False) -> StorageError:
    """Return the error for a destination that the system refuses to write.

    Args:
        path: the destination.
        problem: the system's error.
        kept: whether a folder remains that the next `pack` can resume from.
    """
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = (
        "Free space or choose another destination"
        if full
        else "Check the permissions, then pack again"
    )
    if kept:
        fix += f"; what is packed so far is kept in {path.name}{PARTIAL_SUFFIX}"
    else:
        fix += "; no files were left behind"
    return StorageError(
        "the disk is full" if full else "cannot write the pack",
        where=str(path),
        why=reason(problem),
        fix=fix,
    )


def _exists(destination: Path) -> DestinationExists:
    return DestinationExists(
        "the destination exists",
        where=str(destination),
        why="packs are never overwritten",
        fix="Remove it or choose another destination",
    )
