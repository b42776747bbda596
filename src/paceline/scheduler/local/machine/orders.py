"""What is started for a submission: its command, with the variables that tell it of the queue."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.config import QUEUE_PREFIX
from paceline.scheduler.local.machine.attempt import Order

if TYPE_CHECKING:
    from paceline.scheduler.local.jobs.devices import LocalDevices
    from paceline.scheduler.local.jobs.records import Attempt
    from paceline.scheduler.local.jobs.submission import Submission
    from paceline.scheduler.local.paths import QueuePaths

_JOB = f"{QUEUE_PREFIX}JOB"
_FOLDER = f"{QUEUE_PREFIX}FOLDER"
_START = f"{QUEUE_PREFIX}START"
_DEVICES = f"{QUEUE_PREFIX}DEVICES"
_PROGRESS = f"{QUEUE_PREFIX}PROGRESS"


def order_for(
    submission: Submission, attempt: Attempt, devices: LocalDevices, paths: QueuePaths
) -> Order:
    """Return what the supervisor of an attempt starts."""
    folder = paths.attempt(attempt.job, attempt.number)
    count = attempt.placement.devices
    variables = {
        _JOB: attempt.job,
        _FOLDER: str(paths.job(attempt.job)),
        _START: str(attempt.number),
        _DEVICES: str(count),
        _PROGRESS: str(folder / "progress"),
        **devices.environment(attempt.placement, submission.environ),
    }
    command = submission.command
    if submission.launcher:
        launcher = (submission.launcher, "-P", "-m", "paceline", "run")
        command = (*launcher, "-n", str(count), "--out", str(folder / "run"), *command)
    return Order(
        command=command,
        folder=submission.folder,
        environ={**submission.environ, **variables},
        cores=devices.cores_of(attempt.placement),
        stop_signal=int(submission.signal_number),
        grace_s=submission.grace_s,
        log_bytes=submission.log_bytes,
    )


def impossible(submission: Submission) -> str:
    """Return why a command cannot be started, in words; empty if nothing is known against it."""
    folder = Path(submission.folder)
    if not folder.is_dir():
        return f"its folder {folder} is not there"
    program = submission.launcher or submission.command[0]
    if "/" in program:
        path = folder / program
        return "" if path.is_file() and os.access(path, os.X_OK) else f"{path} is not executable"
    if shutil.which(program, path=submission.environ.get("PATH", os.defpath)) is None:
        return f"there is no program {program} in its PATH"
    return ""
