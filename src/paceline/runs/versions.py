"""Versions of all software on which the outcome of a run may depend."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from typing import Any

from paceline import __version__


def versions() -> dict[str, Any]:
    """Return the versions of Paceline, Python, torch and the kernel, and the host."""
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
