"""`paceline.record`: a line in a script that records it, however its processes were started.

For what `paceline run` and `paceline record` cannot reach: a container's runtime, a remote shell, a
notebook. There is no launcher that could write a result; ``paceline why`` and ``paceline report``
read the traces.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.clock import SystemClock
from paceline.core.config import environment
from paceline.core.errors import DestinationExists, UsageError, storage_errors
from paceline.launch import attach
from paceline.launch.folder import default_folder, write_start

if TYPE_CHECKING:
    import os


def record(run: str | os.PathLike[str] | None = None) -> None:
    """Record this process as a rank; see `paceline.record`."""
    if attach.is_recorded():
        return
    if environment().get(attach.VARIABLE):  # below the launcher this line must not stop training
        attach.on_training()
        return
    rank, world_size = attach.place()
    if run is None:
        if world_size > 1:
            raise UsageError(
                f"{world_size} ranks need one folder to write to",
                where=f"paceline.record() of rank {rank}",
                fix='Name it: paceline.record("RUN")',
            )
        run = default_folder(Path(sys.argv[0]).stem or "script", None, SystemClock())
    folder = Path(run)
    if (folder / "result.json").exists():
        raise _holds_another(folder)
    with storage_errors("cannot make the run's folder", where=folder, fix="Name another place"):
        (folder / "trace").mkdir(parents=True, exist_ok=True)
    try:
        attach.start_here(folder)
    except DestinationExists:  # without a launcher a run has no result.json, only traces
        why = f"it has a trace of rank {rank}, of an earlier run or of another process"
        raise _holds_another(folder, why) from None
    if rank == 0:
        write_start(
            folder,
            None,
            values={},
            script=sys.argv[0],
            args=sys.argv[1:],
            world_size=world_size,
            threads=None,
            launcher=None,
        )


def _holds_another(folder: Path, why: str = "") -> DestinationExists:
    return DestinationExists(
        "the folder holds another run",
        where=str(folder),
        why=why,
        fix="Name another folder, or remove this one",
    )
