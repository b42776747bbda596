"""What a run was made of: versions, and the machine as far as it is known."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.core.config import cache_folder
from paceline.core.errors import ConfigError, NotFound, StorageError
from paceline.core.files import read_text
from paceline.core.machine import Device, Machine, Quantity
from paceline.launch import node
from paceline.launch.budget import allowed_cores

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def versions() -> dict[str, Any]:
    """Return what a run's outcome may depend on: versions of what took part."""
    found: dict[str, Any] = {
        "version": 1,
        "paceline": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "host": socket.gethostname(),
    }
    for name in ("torch", "numpy", "scikit-learn", "mpi4py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return where this host's probed machine lies; nodes that share a home have a file each."""
    return cache_folder(environ) / f"machine-{socket.gethostname()}.json"


def known_machine(path: Path | None) -> Machine:
    """Return the probed machine, or what can be said of this one without probing.

    A run does not need it: a file in the cache that an older Paceline wrote, or that is damaged, is
    told as missing instead of ending the run. One that the user named is not.

    Raises:
        NotFound, StorageError, ConfigError: there is no machine at `path`.
    """
    if path is not None:
        return Machine.from_text(read_text(path), where=str(path))
    missing = (
        "not probed: run `paceline probe` to measure it; cores and memory are what the kernel says"
    )
    try:
        return Machine.from_text(read_text(machine_path()), where=str(machine_path()))
    except NotFound:
        pass
    except (ConfigError, StorageError) as problem:
        missing = f"the probed machine cannot be read ({problem}); {missing}"
    # What the kernel says was not measured, and no more than what a control group leaves.
    device = Device(
        name=node.cpu_name(),
        kind="cpu",
        cores=len(allowed_cores()),
        memory_bytes=Quantity(value=float(node.memory_bytes()), source="datasheet"),
    )
    return Machine(name=socket.gethostname(), devices=(device,), missing=(missing,))
