"""Folders that programs of a run write to, on local storage first.

paceline run --output /shared/out:/mnt/out -- program
    |
    |  on each node a server (output_server.py) with a folder on local storage, and for programs
    |
    +-- _PACELINE_OUTPUTS  for the library for mounts (native/posix/outputs.c)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_FORM = "Write --output FOLDER:/path, as /shared/run7:/out"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutput:
    """A folder that programs write to.

    Attributes:
        target: absolute path of the folder of the shared file system.
        point: absolute path below which programs write and read; nothing needs to be there.
    """

    target: str
    point: str


def parse_outputs(specs: Iterable[str], points: Sequence[str]) -> tuple[RunOutput, ...]:
    """Return what ``FOLDER:/path`` stands for, each checked, and with each other.

    Args:
        specs: of the outputs.
        points: below which programs see packs.

    Raises:
        UsageError: a specification without a path, or paths that overlap.
    """
    outputs: list[RunOutput] = []
    for spec in specs:
        output = _parse(spec)
        taken = [*points, *(path for other in outputs for path in (other.point, other.target))]
        for path in taken:
            if any(_overlap(path, own) for own in (output.point, output.target)):
                raise UsageError(
                    f"output {spec} and {path} overlap",
                    why="one path would mean two files",
                    fix="Give each output a folder and a path of its own, none inside another",
                )
        outputs.append(output)
    return tuple(outputs)


def _parse(spec: str) -> RunOutput:
    folder, colon, point = spec.rpartition(":")
    if not colon or not folder or not point:
        raise UsageError(f"{spec!r} names no folder and path", fix=_FORM)
    target = os.path.abspath(folder)  # noqa: PTH100  # Path.absolute keeps ".."
    point = os.path.abspath(point)  # noqa: PTH100  # as above
    if "/" in (target, point):
        raise UsageError("an output cannot be /", where=spec, fix=_FORM)
    if any(character in spec for character in "\t\n"):
        raise UsageError(
            "an output has a tab or a line break in its path", where=repr(spec), fix=_FORM
        )
    if _overlap(target, point):
        raise UsageError(
            "an output would hide its own folder",
            where=spec,
            fix="Choose a path outside of the folder that files are drained to",
        )
    for path in (target, point):
        if Path(path).exists() and not Path(path).is_dir():
            raise UsageError("a file is where a folder is needed", where=path, fix=_FORM)
    return RunOutput(target=target, point=point)


def _overlap(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/")
