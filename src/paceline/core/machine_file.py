"""The machine file, which `paceline probe` writes, and predictions and collectives read.

Paceline brings descriptions of published machines with it: the folder ``paceline/machines``.
"""

from __future__ import annotations

import contextlib
import json
import socket
from importlib import resources
from typing import TYPE_CHECKING

from paceline.core.config import cache_folder
from paceline.core.errors import NotFound
from paceline.core.file_kind import FileKind, refuse_other_kind
from paceline.core.files import read_text
from paceline.core.machine import Machine
from paceline.core.record import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def machine_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return where this host's probed machine lies; nodes that share a home have a file each."""
    return cache_folder(environ) / f"machine-{socket.gethostname()}.json"


def read_machine(path: Path) -> Machine:
    """Return the machine in a file.

    Raises:
        NotFound, StorageError, CorruptData: there is no such file, or it cannot be read.
        ConfigError: it is not a machine file.
    """
    text, where = read_text(path), str(path)
    with contextlib.suppress(json.JSONDecodeError):  # Machine says where it is wrong
        refuse_other_kind(json.loads(text), FileKind.MACHINE, where)
    return Machine.from_text(text, where=where)


def library_names() -> tuple[str, ...]:
    """Return the names of the machines that Paceline describes, in alphabetical order."""
    folder = resources.files("paceline") / "machines"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def library_machine(name: str) -> Machine:
    """Return the machine that Paceline describes under `name`.

    Raises:
        NotFound: there is none of that name.
    """
    known = library_names()
    if name not in known:
        raise NotFound(
            f"no machine '{name}' in Paceline's library",
            where="paceline plan --machine",
            fix=nearest(name, known),
        )
    entry = resources.files("paceline") / "machines" / f"{name}.json"
    return Machine.from_text(entry.read_text("utf-8"), where=f"machine {name}")
