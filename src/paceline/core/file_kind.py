"""Tells plan files and machine files from each other and from the user's own files.

A file's kind shows in its fields, whatever its version: also files of later versions are known.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, storage_errors
from paceline.core.files import check_replaceable, prepare_file

if TYPE_CHECKING:
    from pathlib import Path


class FileKind(StrEnum):
    """A kind of file that one command writes and another one reads."""

    PLAN = "plan"
    MACHINE = "machine"


_OPTIONS = {FileKind.PLAN: "--plan", FileKind.MACHINE: "--machine"}
_WRITERS = {FileKind.PLAN: "paceline plan --out", FileKind.MACHINE: "paceline probe --out"}


def kind_of(data: object) -> FileKind | None:
    """Return the kind of a file by its JSON `data`; None if it is of no known kind.

    >>> kind_of({"version": 9, "name": "node", "devices": []})
    <FileKind.MACHINE: 'machine'>
    >>> kind_of({"plan": {"mesh": {}}}), kind_of({"mesh": {}}), kind_of({"plan": "of a day"})
    (<FileKind.PLAN: 'plan'>, <FileKind.PLAN: 'plan'>, None)
    """
    if not isinstance(data, dict):
        return None
    if "name" in data and isinstance(data.get("devices"), list):
        return FileKind.MACHINE
    if {"breakdown", "memory_bytes", "limit"} <= data.keys():  # an Estimate, once a plan file
        return FileKind.PLAN
    plan = data.get("plan", data)  # in a plan file; or a Plan alone
    if isinstance(plan, dict) and isinstance(plan.get("mesh"), dict):
        return FileKind.PLAN
    return None


def refuse_other_kind(data: object, wanted: FileKind, where: str) -> None:
    """Refuse the JSON `data` of a file of another kind than the wanted one.

    Data of no known kind passes: the reader of the file says what is wrong.

    Raises:
        ConfigError: the file is of another known kind.
    """
    found = kind_of(data)
    if found is not None and found is not wanted:
        raise ConfigError(
            f"this is a {found} file, not a {wanted} file",
            where=where,
            fix=f"Give it to {_OPTIONS[found]}, or give a file that `{_WRITERS[wanted]}` wrote",
        )


def prepare_output(path: Path, kind: FileKind) -> None:
    """See that a file of `kind` can be written to the `path` that the user named.

    An existing file is replaced only if it is of the same kind. Call this before work begins.

    Raises:
        DestinationExists: something else is there.
        NotFound: the folder to write to is not there.
        StorageError: the folder cannot be written to.
    """
    fix = "Name another file with --out"
    with storage_errors("cannot write", where=path, fix=fix):  # in a folder that one may not search
        check_replaceable(
            path, lambda path: _kind_of_file(path) is kind, what=f"a {kind} file", fix=fix
        )
    prepare_file(path)


def _kind_of_file(path: Path) -> FileKind | None:
    try:
        return kind_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):  # not readable, not text, or not JSON
        return None
