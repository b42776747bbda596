"""Mounts: which packs appear where, and the variables by which programs get them.

    paceline store exec --mount train.pack:/data -- python train.py
                                  |
        LD_PRELOAD=libpaceline_posix.so  _PACELINE_MOUNTS="train.pack TAB /data"
                                  |
    python: open("/data/cat/1.jpg") --> native/posix: a sample of train.pack

There is no daemon, and nothing to clean up: a mount is there for the programs that inherit these
variables, and it goes away with them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import Missing, UsageError
from paceline.native import posix_library, preloaded
from paceline.store.in_place.opening import open_pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Not PACELINE_: these are no settings of the user's. native/posix/mounts.c reads them.
MOUNTS = "_PACELINE_MOUNTS"
OUTPUTS = "_PACELINE_OUTPUTS"
ONLY = "_PACELINE_MOUNT_ONLY"
NOT = "_PACELINE_MOUNT_NOT"
_MOST = 16  # of native/posix/mounts.c
_FORM = "Write PACK:/path, as train.pack:/data"


@dataclass(frozen=True, slots=True)
class PackMount:
    """A pack, or data in place, and where programs see it.

    Attributes:
        place: absolute path of the pack's folder, or of the index of data in place.
        point: absolute path below which its samples appear; nothing needs to exist there.
        requests: of a pack that nodes serve (`paceline.store.serve.run_data`): where this node's
            server takes requests; `place` then has the index and some of the shards.
        source: the whole pack, likewise.
    """

    place: str
    point: str
    requests: str = ""
    source: str = ""

    def to_line(self) -> str:
        """Return it as native/posix/mounts.c reads it."""
        served = [self.requests, self.source] if self.requests else []
        return "\t".join([self.place, self.point, *served])


def parse_mounts(specs: Iterable[str]) -> tuple[PackMount, ...]:
    """Return what ``PACK:/path`` stands for, each checked, and with each other.

    A point may also be relative to the working folder.

    Raises:
        UsageError: a specification without a path, or points that overlap.
        NotFound: there is no such pack.
        CorruptPack: it is one, and damaged.
    """
    mounts = tuple(_parse(spec) for spec in specs)
    if len(mounts) > _MOST:
        raise UsageError(f"{len(mounts)} mounts are too many", fix=f"Give at most {_MOST}")
    for i, mount in enumerate(mounts):
        for other in mounts[:i]:
            if _is_within(mount.point, other.point) or _is_within(other.point, mount.point):
                raise UsageError(
                    f"mount {mount.point} and mount {other.point} overlap",
                    why="one path would mean two samples",
                    fix="Give each pack a path of its own, none inside another",
                )
        for holder in mounts:
            if _is_within(mount.place, holder.point):
                raise UsageError(
                    f"mount {holder.point} would hide the pack {mount.place}",
                    fix="Choose a path that does not hold the pack",
                )
    return mounts


def variables(
    mounts: Sequence[PackMount],
    environ: Mapping[str, str],
    *,
    only: Sequence[str] = (),
    never: Sequence[str] = (),
    outputs: Sequence[tuple[str, str, bool]] = (),
) -> dict[str, str]:
    """Return the variables that give a program these mounts, and what it starts.

    Args:
        mounts: from `parse_mounts`; without any, and without outputs, there are no variables.
        environ: what the program gets otherwise: other libraries to preload stay.
        only: names of the programs that see the mounts; none: all.
        never: names of programs that do not.
        outputs: folders that programs write to (`paceline.store.serve.run_output`): for each its
            folder on this node, the path below which programs see it, and whether programs of other
            nodes write to it, too.

    Raises:
        Missing: the library was not installed with Paceline.
        UsageError: a name of a program is a path.
    """
    if not mounts and not outputs:
        return {}
    for name in (*only, *never):
        if not name or "/" in name or ":" in name:
            raise UsageError(
                f"{name!r} is not the name of a program", fix="Give the last part of its path"
            )
    library = posix_library()
    if not library.is_file():
        raise Missing(
            "the library for mounts is missing",
            where=str(library),
            why="it is built with Paceline on Linux with glibc",
            fix="There, install Paceline again: pip install .; or extract the pack",
        )
    found = preloaded(library, environ)
    if mounts:
        found[MOUNTS] = "\n".join(mount.to_line() for mount in mounts)
    if outputs:
        found[OUTPUTS] = "\n".join(
            "\t".join([folder, point, *(["shared"] if is_shared else [])])
            for folder, point, is_shared in outputs
        )
    return (
        found | ({ONLY: ":".join(only)} if only else {}) | ({NOT: ":".join(never)} if never else {})
    )


def _parse(spec: str) -> PackMount:
    path, colon, point = spec.rpartition(":")
    if not colon or not path or not point:
        raise UsageError(f"{spec!r} names no pack and path", fix=_FORM)
    point = os.path.abspath(point)  # noqa: PTH100  # Path.absolute keeps ".."
    if point == "/":
        raise UsageError("a pack cannot be mounted as /", where=spec, fix=_FORM)
    if any(character in spec for character in "\t\n"):
        raise UsageError(
            "a mount has a tab or a line break in its path", where=repr(spec), fix=_FORM
        )
    if os.path.isfile(point):  # noqa: PTH113  # Path.is_file raises where a server was killed
        raise UsageError(
            "a file is where the pack is to be mounted",
            where=point,
            fix="Give the path of a folder, or one where nothing is",
        )
    with open_pack(path, index_only=True) as pack:
        place = pack.side_file or pack.path
    return PackMount(place=os.path.abspath(place), point=point)  # noqa: PTH100  # as above


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
