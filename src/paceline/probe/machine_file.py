"""Reads a host's probed Machine, or describes a host that was not probed."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from paceline.core import node
from paceline.core.affinity import allowed_cores
from paceline.core.errors import ConfigError, CorruptData, NotFound, StorageError
from paceline.core.machine import Device, Machine, Quantity
from paceline.core.machine_file import library_machine, machine_path, read_machine

if TYPE_CHECKING:
    from pathlib import Path


def load_machine(path: Path | None = None) -> Machine:
    """Return the machine at `path`, by default this host as it was probed.

    Args:
        path: a file, or the name of a machine of Paceline's library, as ``selene``.

    Raises:
        NotFound: there is none.
    """
    if path is not None and not path.exists() and not path.suffix and len(path.parts) == 1:
        return library_machine(str(path))
    chosen = path or machine_path()
    if not chosen.exists():
        raise NotFound(
            "no description of the machine",
            where=str(chosen),
            why="predictions start from measured rates",
            fix=f"Run `paceline probe{f' --out {path}' if path else ''}`",
        )
    return read_machine(chosen)


def known_machine(path: Path | None) -> Machine:
    """Return the probed machine, or without a probe this host's cores and memory.

    A run does not need it: a damaged file in the cache is reported as missing instead of ending the
    run. A damaged file that the user named is an error.

    Raises:
        NotFound, StorageError, CorruptData, ConfigError: there is no machine at `path`.
    """
    if path is not None:
        return read_machine(path)
    missing = (
        "not probed: run `paceline probe` to measure it; cores and memory are what the kernel says"
    )
    try:
        return read_machine(machine_path())
    except NotFound:
        pass
    except (ConfigError, StorageError, CorruptData) as problem:
        missing = f"the probed machine cannot be read ({problem}); {missing}"
    # Figures from the kernel are not measured; a control group's limits apply to them.
    device = Device(
        name=node.cpu_name(),
        kind="cpu",
        cores=len(allowed_cores()),
        memory_bytes=Quantity(value=float(node.memory_bytes()), source="datasheet"),
    )
    return Machine(name=socket.gethostname(), devices=(device,), missing=(missing,))
