"""Mounts by FUSE without root, by the system's setuid program fusermount3.

It mounts, and hands over the descriptor of /dev/fuse through a socket whose number it finds in a
variable (fuse's util/fusermount.c).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

from paceline.core.config import environment
from paceline.core.errors import Missing, StorageError

_PROGRAMS = ("fusermount3", "fusermount")
_OPTIONS = "ro,nosuid,nodev,default_permissions,subtype=paceline"
_WAIT_S = 20.0
_FIX = "Try it by hand: fusermount3 -u, and see the kernel's log (dmesg)"


def find_fusermount() -> str:
    """Return the path of the program.

    Raises:
        Missing: there is none.
    """
    for program in _PROGRAMS:
        if found := shutil.which(program):
            return found
    raise Missing(
        "fusermount3 is not installed",
        why="only root can mount without it",
        fix="Install it: apt-get install fuse3, or dnf install fuse3; or use paceline store exec",
    )


def mount_by_fusermount(source: str, point: str) -> int:
    """Mount a file system by FUSE; return the descriptor from which its requests are read.

    Args:
        source: what the system calls the mount.
        point: an empty folder of the user's.

    Raises:
        Missing: there is no fusermount3.
        StorageError: it refused, or did not answer.
    """
    program = find_fusermount()
    name = source.replace("\\", "\\\\").replace(",", "\\,")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _call(
            [program, "-o", f"{_OPTIONS},fsname={name}", "--", point],
            what="cannot mount",
            point=point,
            descriptor=theirs.fileno(),
        )
        ours.settimeout(_WAIT_S)
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        except OSError as problem:
            why = f"{program}: {problem}"
            raise StorageError("cannot mount", where=point, why=why, fix=_FIX) from None
    if not descriptors:
        why = f"{program} handed over nothing"
        raise StorageError("cannot mount", where=point, why=why, fix=_FIX)
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def unmount_by_fusermount(point: str, *, lazy: bool) -> None:
    """Take a mount of the user's away.

    Raises:
        Missing: there is no fusermount3.
        StorageError: it refused, for example because a file is open.
    """
    words = [find_fusermount(), "-u", *(["-z"] if lazy else []), "--", point]
    _call(words, what="cannot unmount", point=point)


def _call(words: list[str], *, what: str, point: str, descriptor: int | None = None) -> None:
    variable = {} if descriptor is None else {"_FUSE_COMMFD": str(descriptor)}
    try:
        done = subprocess.run(
            words,
            env={**environment(), "LC_ALL": "C", **variable},
            pass_fds=[] if descriptor is None else [descriptor],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_WAIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = f"{words[0]} did not end within {_WAIT_S:.0f} s"
        raise StorageError(what, where=point, why=why, fix=_FIX) from None
    if done.returncode != 0:
        why = os.fsdecode(done.stderr).strip() or f"{words[0]} ended with {done.returncode}"
        raise StorageError(what, where=point, why=why, fix="Look whether the folder is yours")
