"""The mounts of this system, as /proc/self/mountinfo lists them.

A mount is looked up here and not by asking its file system, which may have no server any more, or
one that does not answer.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

KIND = "fuse.paceline"
_TABLE = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """A mount.

    Attributes:
        point: absolute path of the folder.
        kind: of file system.
        source: what is mounted; of Paceline's own, the pack.
        connection: of a mount by FUSE, its number in /sys/fs/fuse/connections.
    """

    point: str
    kind: str
    source: str
    connection: int


def parse_table(text: bytes) -> list[MountEntry]:
    """Return the mounts of a mountinfo file, in its order (proc(5))."""
    found = []
    for line in text.splitlines():
        place, _, system = line.partition(b" - ")
        words = place.split(b" ")
        kind, source = system.split(b" ")[:2]
        found.append(
            MountEntry(
                point=_unescaped(words[4]),
                kind=kind.decode(),
                source=_unescaped(source),
                connection=int(words[2].partition(b":")[2]),
            )
        )
    return found


def find_mount(point: str) -> MountEntry | None:
    """Return the mount at this folder; of several, the one on top.

    Args:
        point: path, in which only the folders above the mount may be symbolic links.
    """
    place = real_point(point)
    found = None
    for entry in parse_table(_TABLE.read_bytes()):
        if entry.point == place:
            found = entry
    return found


def real_point(point: str) -> str:
    """Return the absolute path of a mount, without links above it; the mount is not asked."""
    above, last = os.path.split(os.path.abspath(point))  # noqa: PTH100  # Path.absolute keeps ".."
    return os.path.join(os.path.realpath(above), last)  # noqa: PTH118  # a string in, a string out


def _unescaped(word: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), word))
