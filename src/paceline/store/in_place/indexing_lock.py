"""Lets one process at a time make a side file; the others wait for it, and open what it made.

All ranks of a job open their data at the same time, also on several hosts. The lock is on a file
beside the side file, ``.x.mdb.pace.lock``, because NFS locks only files that are open for writing,
and so no folders. Its owner removes it; of an owner that was killed, the next takes it over.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Self

from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded
from paceline.core.files import LockOutcome, try_lock
from paceline.store.format.layout import LOCK_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.core.clock import Clock

_WAIT_S = 6 * 3600.0  # millions of members of archives on a disk take an hour
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 1.0


class IndexingLock:
    """The lock of the side file at `place`; leaving the context gives it back.

    Where the file system has no locks, every process gets it: each then makes the side file in a
    folder of its own, and the last to end replaces those of the others, which say the same.
    """

    def __init__(self, place: Path, clock: Clock | None = None) -> None:
        self.place = place
        self.is_exclusive = False
        self._path = place.with_name(f".{place.name}{LOCK_SUFFIX}")
        self._clock = clock or SystemClock()
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # another user's
                self._path.unlink()  # first: who opened it sees that it is gone, and tries again
            os.close(self._descriptor)
            self._descriptor = -1
            self.is_exclusive = False

    def attempts(self) -> Iterator[bool]:
        """Yield False after each pause in which another process held the lock, and then True.

        Raises:
            DeadlineExceeded: it holds the lock for too long.
            OSError: the lock file cannot be made.
        """
        end_s = self._clock.now_s() + _WAIT_S
        pause_s = _FIRST_PAUSE_S
        while not self._acquire():
            if self._clock.now_s() >= end_s:
                raise DeadlineExceeded(
                    "another process has not finished the index of the data",
                    where=str(self._path),
                    why=f"it has held this lock for {_WAIT_S / 3600:.0f} hours",
                    fix="Stop that process (lslocks names it), or make the index first: "
                    "paceline store ls",
                )
            self._clock.wait(threading.Event(), pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            yield False
        yield True

    def wait(self) -> None:
        """Return once this process holds the lock; errors are those of `attempts`."""
        for _ in self.attempts():
            pass

    def _acquire(self) -> bool:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except PermissionError:  # another user's
            descriptor = os.open(self._path, os.O_RDONLY | flags)
        outcome = try_lock(descriptor)
        if outcome is LockOutcome.UNSUPPORTED or (
            outcome is LockOutcome.ACQUIRED and self._is_at_its_path(descriptor)
        ):
            self._descriptor = descriptor
            self.is_exclusive = outcome is LockOutcome.ACQUIRED
            return True
        os.close(descriptor)
        return False

    def _is_at_its_path(self, descriptor: int) -> bool:
        """Return whether no owner removed the file between our open and our lock."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False
