"""Programs that can be given a mount: what the loader of shared libraries runs.

The loader ignores LD_PRELOAD in a program that is setuid, and a static program has no loader: both
would see nothing of a mount, and say nothing.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.store.posix.mounts import PackMount

_ELF = b"\x7fELF"
_INTERPRETER = 3  # PT_INTERP of a program header: the loader's path
_HEAD_BYTES = 4096
_FIX = (
    "Mount the pack by FUSE: paceline store mount PACK:/path -- PROGRAM; "
    "or extract it: paceline store extract"
)


def command_for(words: Sequence[str], mounts: Sequence[PackMount]) -> tuple[str, list[str]]:
    """Return what to execute so that a program sees mounts, and its arguments.

    Of a script, its interpreter is checked. A program in a mount is started by `env`, which sees
    the mounts, as this process does not.

    Args:
        words: the program, as a user names it, and its arguments.
        mounts: what it will see.

    Raises:
        NotFound: there is no such program.
        UsageError: it is static or setuid.
    """
    name = words[0]
    if "/" in name:
        path = os.path.abspath(name)  # noqa: PTH100  # Path.absolute keeps ".."
        if any(path.startswith(f"{mount.point}/") for mount in mounts):
            starter, _ = command_for(["env"], ())
            return starter, ["env", path, *words[1:]]
    found = shutil.which(name)
    if found is None:
        raise NotFound(f"no program {name!r}", fix="Give its path, or a name that is on PATH")
    _check(Path(found))
    return found, list(words)


def _check(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:  # a program that may be executed and not read
        return
    if head.startswith(b"#!"):
        words = os.fsdecode(head[2:].split(b"\n", 1)[0]).split()
        if words and Path(words[0]).is_file():
            _check(Path(words[0]))
        return
    if mode & (stat.S_ISUID | stat.S_ISGID):
        raise UsageError(
            "a setuid program cannot see a mount",
            where=str(path),
            why="the system loads no libraries of the caller's into it",
            fix=_FIX,
        )
    if head.startswith(_ELF) and not _has_loader(head):
        raise UsageError(
            "a static program cannot see a mount",
            where=str(path),
            why="it calls the kernel without the C library, in which the mount is",
            fix=_FIX,
        )


def _has_loader(head: bytes) -> bool:
    """Whether a 64-bit ELF file names a loader; True where its headers lie elsewhere."""
    if len(head) < 64 or head[4] != 2:  # 32 bits: the library cannot be loaded, ld.so says so
        return True
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    if offset + size * count > len(head):
        return True
    kinds = (struct.unpack_from("<I", head, offset + size * i)[0] for i in range(count))
    return _INTERPRETER in kinds
