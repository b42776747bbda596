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
_MOST_LINKS = 40  # as the kernel follows
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
        point: path of the folder, or of a symbolic link to it.
    """
    place = real_point(point)
    found = [entry for entry in parse_table(_TABLE.read_bytes()) if entry.point == place]
    return found[-1] if found else None


def real_point(point: str) -> str:
    """Return the absolute path of a folder, without links.

    What is mounted there is not asked: not even whether it is a link.
    """
    mounted = {entry.point for entry in parse_table(_TABLE.read_bytes())}
    for _ in range(_MOST_LINKS):
        above, last = os.path.split(os.path.abspath(point))  # noqa: PTH100  # it removes ".."
        place = os.path.join(os.path.realpath(above), last)  # noqa: PTH118  # a string in and out
        if place in mounted or not os.path.islink(place):  # noqa: PTH114
            return place
        point = os.path.join(os.path.dirname(place), os.readlink(place))  # noqa: PTH115,PTH118,PTH120
    return place


def _unescaped(word: bytes) -> str:
    return os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), word))
