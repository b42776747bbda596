"""Which process launched a run, and whether it is still there.

A launcher writes who it is at the start and the result at the end. Without a result, this tells a
run that is still going on from one whose launcher was killed.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from paceline.core.processes import boot_id, started_ticks


def this_launcher() -> dict[str, Any]:
    """Return what identifies this process among all processes of all machines, for JSON."""
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "namespace": _pid_namespace(),
        "pid": os.getpid(),
        "started_ticks": started_ticks(os.getpid()),
    }


def is_alive(launcher: dict[str, Any]) -> bool | None:
    """Return whether the process that `this_launcher` described runs; None if it is not known.

    It is not known of a process of another machine, or of another container on this machine.
    """
    if not launcher.get("boot_id") or launcher.get("namespace") != _pid_namespace():
        return None
    if launcher["boot_id"] != _boot_id():
        # The machine has been started again since, or it is another one.
        return False if launcher.get("host") == socket.gethostname() else None
    ticks = started_ticks(int(launcher.get("pid", 0)))
    return ticks is not None and ticks == launcher.get("started_ticks")


def _boot_id() -> str:
    try:
        return boot_id()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
