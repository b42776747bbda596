"""Paceline: measure, predict and fix what holds distributed deep learning back.

A script may say where its steps end (`step`), and record itself (`record`), if it likes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.core.step_mark import step

if TYPE_CHECKING:
    import os

__version__ = "0.1.0"
__all__ = ["__version__", "record", "step"]


def record(run: str | os.PathLike[str] | None = None) -> None:
    """Record this process as a rank from here on, until it ends.

    Call it before the training loop, in each rank; before or after the process group is made. Under
    ``paceline run`` and ``paceline record`` the process belongs to that run, and `run` is ignored;
    a process that cannot be recorded there is warned about, and trains on.
    The rank is that of torch's process group, else the environment's RANK and WORLD_SIZE, else 0.

    Args:
        run: folder of the run, the same for all its ranks; it must not hold another run. None
            chooses one below ``paceline-runs``, for a run of one rank.

    Raises:
        UsageError: there are several ranks and no folder.
        DestinationExists: the folder holds another run, or another process is this rank.
        StorageError: the folder cannot be written.
    """
    importlib.import_module("paceline.launch.scripted").record(run)
