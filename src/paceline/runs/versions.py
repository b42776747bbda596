"""What took part in a run: versions of everything that its outcome may depend on."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from typing import Any

from paceline import __version__


def versions() -> dict[str, Any]:
    """Return what a run's outcome may depend on: versions of what took part."""
    known: dict[str, Any] = {
        "version": 1,
        "paceline": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "host": socket.gethostname(),
    }
    for name in ("torch", "numpy", "scikit-learn", "mpi4py"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = None
    return known
