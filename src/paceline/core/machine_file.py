"""The machine file, which `paceline probe` writes, and predictions and collectives read."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING

from paceline.core.config import cache_folder
from paceline.core.file_kind import FileKind, refuse_other_kind
from paceline.core.files import read_text
from paceline.core.machine import Machine

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
