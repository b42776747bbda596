"""A pack as a file system of the kernel (FUSE), for programs that no library can be loaded into.

    paceline store mount train.pack:/data
          |  mount(2), or fusermount3 without root
          v
    kernel: /data  <--requests, replies-->  threads of the core (fuse_server.hpp)

The mount lives as long as the process that serves it. One whose server was killed stays in the
tree; the next mount at the same folder, or `unmount_pack`, takes it away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import (
    DeadlineExceeded,
    DestinationExists,
    Missing,
    NotFound,
    StorageError,
    UsageError,
)
from paceline.native import FuseServer, FuseStats, mount_fuse, unmount
from paceline.store.posix.fusermount import (
    find_fusermount,
    mount_by_fusermount,
    unmount_by_fusermount,
)
from paceline.store.posix.mount_table import KIND, find_mount, real_point

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.store.posix.mounts import PackMount

_DEVICE = Path("/dev/fuse")
_CONNECTIONS = Path("/sys/fs/fuse/connections")
_ANSWER_S = 5.0  # for a server that is asked whether it is there
_READY_S = 20.0  # for the kernel's first request
_CONTAINER = "A container needs --device /dev/fuse and --cap-add SYS_ADMIN"
_INSTEAD = "or use paceline store exec, or extract the pack: paceline store extract"

THREADS = 4  # so that no request waits for one thread that decompresses a large sample


class FuseMount:
    """A pack that is mounted, from here to `close`.

    Args:
        mount: the pack, and an empty folder that exists.
        threads: that serve the kernel.
        tell: takes a line about what is not as usual.

    Raises:
        CorruptPack: the pack is damaged.
        DestinationExists: a pack is mounted there.
        NotFound: there is no such folder.
        UsageError: it is no folder, or not empty.
        Missing: there is no FUSE here, or no fusermount3.
        StorageError: the system refuses.
        DeadlineExceeded: a mount that is there already, or the kernel, does not answer.
    """

    def __init__(
        self, mount: PackMount, *, threads: int = THREADS, tell: Callable[[str], None]
    ) -> None:
        self.mount = mount
        self._tell = tell
        self._server = FuseServer(mount.place)
        check_point(mount.point, tell=tell)
        device = _connect(mount)
        try:
            found = find_mount(mount.point)
            self._connection = found.connection if found else 0
            self._server.start(device, threads)
            if not self._server.wait_ready(_READY_S):
                raise DeadlineExceeded(
                    "the kernel does not answer",
                    where=mount.point,
                    why=f"it sent no first request within {_READY_S:.0f} s",
                    fix="See the kernel's log (dmesg), or try again when less runs here",
                )
        except BaseException:
            with contextlib.suppress(OSError, Missing):
                _take_away(mount.point, lazy=True)
            raise

    @property
    def ended(self) -> int:
        """A descriptor that can be read once the mount is gone."""
        return self._server.ended

    def stats(self) -> FuseStats:
        """Return what was served so far."""
        return self._server.stats()

    def close(self, *, grace_s: float, hurry: int) -> None:
        """Unmount, and wait for files that are still open.

        Args:
            grace_s: for these files; their programs' next reads fail afterwards.
            hurry: a descriptor; what can be read from it ends the wait.

        Raises:
            StorageError: files were open for longer; or the system refuses.
        """
        if _can_read(0.0, self.ended):
            return
        point = self.mount.point
        try:
            _take_away(point, lazy=False)
        except StorageError as problem:
            if not _is_busy(problem):
                raise
            _take_away(point, lazy=True)
            self._tell(
                f"{point} is gone, but its files are open: waiting for their programs, "
                f"{grace_s:.0f} s at most"
            )
            _can_read(grace_s, self.ended, hurry)
            if _can_read(0.0, self.ended):
                return
        else:
            if _can_read(_ANSWER_S, self.ended):
                return
        with contextlib.suppress(OSError):  # not everywhere; the end of this process does it, too
            (_CONNECTIONS / str(self._connection) / "abort").write_text("1")
            _can_read(_ANSWER_S, self.ended)
        raise StorageError(
            "programs had files of the mount open",
            where=point,
            why="their next reads fail",
            fix="End the programs that use a mount before it",
        )


def check_point(point: str, *, tell: Callable[[str], None], dry_run: bool = False) -> None:
    """Refuse what nothing can be mounted at; take a mount without a server away.

    Args:
        point: of the mount.
        tell: takes a line about such a mount.
        dry_run: leave it.

    Raises:
        DestinationExists: a pack is mounted there.
        NotFound: there is no such folder.
        UsageError: it is no folder, or not empty.
        StorageError: it cannot be read.
        DeadlineExceeded: a mount that is there already does not answer.
    """
    found = find_mount(point)
    if found is not None and found.kind == KIND:
        if is_served(point):
            raise DestinationExists(
                "a pack is mounted there already",
                where=point,
                why=found.source,
                fix=f"Give another folder, or: paceline store unmount {point}",
            )
        tell(f"{point}: a mount of {found.source}, whose server was killed, is taken away")
        if dry_run:
            return
        _take_away(point, lazy=True)
    try:
        with os.scandir(point) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        raise NotFound(
            "there is no folder to mount at", where=point, fix=f"Make it: mkdir -p {point}"
        ) from None
    except NotADirectoryError:
        raise UsageError(
            "a pack can only be mounted at a folder", where=point, fix="Give an empty folder"
        ) from None
    except OSError as problem:
        raise StorageError(
            "cannot mount there", where=point, why=problem.strerror or "", fix="Give another folder"
        ) from None
    if first is not None:
        raise UsageError(
            "the folder to mount at is not empty",
            where=point,
            why=f"it has {first.name!a}, which the mount would hide",
            fix="Give an empty folder",
        )


def unmount_pack(point: str, *, lazy: bool = False, dry_run: bool = False) -> str:
    """Take a mount away, whether or not its server is still there; return its pack.

    Args:
        point: the folder.
        lazy: also if files are open: programs go on reading those that they have.
        dry_run: only find it.

    Raises:
        UsageError: no pack is mounted there.
        StorageError: files are open, or the system refuses.
        DeadlineExceeded: its server does not answer.
    """
    found = find_mount(point)
    if found is None or found.kind != KIND:
        raise UsageError(
            "no pack is mounted there",
            where=point,
            why=f"it is a mount of {found.kind}" if found else "it is no mount",
            fix="Give the folder of: paceline store mount PACK:FOLDER",
        )
    if dry_run:
        return found.source
    try:
        _take_away(point, lazy=lazy or not is_served(point))
    except StorageError as problem:
        if _is_busy(problem):
            problem.fix = "End the programs that have files of it open (fuser -vm), or give --lazy"
        raise
    return found.source


def is_served(point: str) -> bool:
    """Return whether a mount has a server.

    Raises:
        DeadlineExceeded: it has one that does not answer.
    """
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        try:
            os.statvfs(point)  # never answered by the kernel alone
        except OSError as problem:
            answers.put(problem.errno not in (errno.ENOTCONN, errno.ECONNABORTED))
        else:
            answers.put(True)

    threading.Thread(target=ask, name="paceline-ask", daemon=True).start()
    try:
        return answers.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise DeadlineExceeded(
            "the server of a mount does not answer",
            where=point,
            why=f"it was asked {_ANSWER_S:.0f} s ago",
            fix=f"End its process, then: paceline store unmount {point}",
        ) from None


def check_system() -> None:
    """Check that packs can be mounted here.

    Raises:
        Missing: there is no FUSE, or no fusermount3 for a user who is not root.
    """
    if not _DEVICE.exists():
        raise Missing(
            "this system has no FUSE",
            where=str(_DEVICE),
            fix=f"Load it: modprobe fuse; {_CONTAINER}; {_INSTEAD}",
        )
    if os.geteuid() != 0:
        find_fusermount()


def _connect(mount: PackMount) -> int:
    """Mount, and return the descriptor of /dev/fuse from which requests are read."""
    check_system()
    point = real_point(mount.point)
    if os.geteuid() != 0:
        return mount_by_fusermount(mount.place, point)
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        try:
            mount_fuse(device, os.fsencode(mount.place), os.fsencode(point))
        except OSError:
            os.close(device)
            raise
    except OSError as problem:
        raise StorageError(
            "cannot mount",
            where=mount.point,
            why=os.strerror(problem.errno or 0),
            fix=f"{_CONTAINER}; {_INSTEAD}",
        ) from None
    return device


def _take_away(point: str, *, lazy: bool) -> None:
    place = real_point(point)
    if os.geteuid() != 0:
        unmount_by_fusermount(place, lazy=lazy)
        return
    try:
        unmount(os.fsencode(place), lazy=lazy)
    except OSError as problem:
        why = os.strerror(problem.errno or 0)
        fix = "Close the files in it, or give --lazy"
        raise StorageError("cannot unmount", where=point, why=why, fix=fix) from None


def _is_busy(problem: StorageError) -> bool:
    return os.strerror(errno.EBUSY) in problem.why


def _can_read(wait_s: float, *descriptors: int) -> bool:
    """Return whether one of the descriptors can be read within this time."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(wait_s * 1000))
