"""Folders on local storage that belong to one run at a time: each has a lock.

The lock is held while the folder is used. The kernel gives it up when the processes that hold it
have ended, however they ended. So a folder whose lock is free was left by a run that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK = "lock"


def make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder, and the descriptor of its lock."""
    while True:  # another launcher may take a folder without a lock for a leftover
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = lock_folder(folder)
        if lock is not None and os.fstat(lock).st_nlink:
            return folder, lock


def leftovers(parent: Path, prefix: str) -> Iterator[contextlib.AbstractContextManager[Path]]:
    """Yield the folders of this user that nobody uses, each locked until its context ends."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or not (folder / _LOCK).exists():
                continue
            lock = lock_folder(folder)
            if lock is not None:
                yield _locked(folder, lock)


@contextlib.contextmanager
def _locked(folder: Path, lock: int) -> Iterator[Path]:
    try:
        yield folder
    finally:
        os.close(lock)


def lock_folder(folder: Path) -> int | None:
    """Return the lock of a folder, as a descriptor; None: another process has it."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
