"""The folder of a new run: its name, whether it is taken, and what is written at the start."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import DestinationExists, StorageError, UsageError
from paceline.core.files import commit_text
from paceline.launch.rendezvous.addresses import FOLDER
from paceline.runs.folder import CONFIG_VERSION, PLAN_NAME, RunFolder, RunState
from paceline.runs.versions import versions

if TYPE_CHECKING:
    from paceline.core.clock import Clock
    from paceline.core.machine import Machine
    from paceline.launch.task_placement import TaskPlacement

# What rank 0 writes before all tasks have arrived: a folder with only these files is of a run that
# is about to start.
_WRITTEN_AT_START = frozenset(
    ("config.json", "versions.json", "machine.json", PLAN_NAME, "trace", FOLDER)
)


def default_folder(stem: str, task: TaskPlacement | None, clock: Clock) -> Path:
    """Return the folder of a run without --out; all tasks choose the same.

    Args:
        stem: what the name begins with.
        task: whose name it ends with; None ends it with the time.
        clock: gives that time.

    Raises:
        UsageError: Slurm, mpirun or ``--rdzv-id`` gives the tasks no common name.
    """
    folder = Path("paceline-runs")
    if task is not None:
        if not task.job_name:
            raise UsageError(
                "the tasks need one folder to write to",
                why="--rdzv-id does not name the job"
                if task.source == "nodes"
                else f"{task.source} gives them no common name",
                fix="Name it with --out",
            )
        return folder / f"{stem}-{task.job_name}"
    stamp = _stamp(clock)
    run = folder / f"{stem}-{stamp}"
    count = 1
    while run.exists():
        count += 1
        run = folder / f"{stem}-{stamp}-{count}"
    return run


def _stamp(clock: Clock) -> str:
    return datetime.fromtimestamp(clock.wall_s(), UTC).strftime("%Y%m%d-%H%M%S")


def claim(run: Path, *, is_default_name: bool) -> Path:
    """Make the folder of a run, and return it; of two runs only one can get a folder.

    Args:
        run: the wanted folder.
        is_default_name: the user gave no --out: if the name is taken, the next free one is used.

    Raises:
        DestinationExists: another run was faster.
        StorageError: the folder cannot be made.
    """
    wanted, count = run, 1
    while True:
        try:
            run.mkdir(parents=True, exist_ok=not is_default_name)
            (run / "trace").mkdir()  # this, and no check before it, decides who has the folder
        except FileExistsError:
            if not is_default_name:
                raise _taken(run) from None
            count += 1
            run = wanted.with_name(f"{wanted.name}-{count}")
        except OSError as problem:
            raise StorageError(
                "cannot make the run's folder",
                where=str(run),
                why=problem.strerror or "",
                fix="Choose another folder: --out RUN",
            ) from problem
        else:
            return run


def set_aside(run: Path) -> Path | None:
    """Rename the folder of an earlier run, to make room for one of the same name.

    Returns:
        Its new name: that of the run, and the next free number, as in ``RUN.1``. None where there
        is nothing in the folder.

    Raises:
        DestinationExists: it holds something else, or a run that is still going on.
        StorageError: it cannot be renamed.
    """
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return None
    if not (run / "config.json").exists() or not (run / "trace").is_dir():
        raise _taken(run)
    if RunFolder(run).state() is RunState.RUNNING:
        raise DestinationExists(
            "a run is still going on in this folder",
            where=str(run),
            fix="Wait for its end, or choose another folder with --out",
        )
    count = 1
    while (aside := run.with_name(f"{run.name}.{count}")).exists():
        count += 1
    try:
        run.rename(aside)
    except OSError as problem:
        raise StorageError(
            "cannot set the earlier run aside",
            where=str(run),
            why=problem.strerror or "",
            fix="Choose another folder: --out RUN",
        ) from problem
    return aside


def refuse_taken(run: Path, rank: int) -> None:
    """Refuse a folder that holds something already, on every task of a step.

    A task other than rank 0 may find the files that rank 0 has just written for this run, and no
    others.

    Raises:
        DestinationExists: the folder is not for this run.
    """
    if not run.exists():
        return
    if not run.is_dir():
        raise _taken(run)
    names = {path.name for path in run.iterdir()}
    if rank != 0:
        names = {name for name in names if not name.endswith(".partial")} - _WRITTEN_AT_START
        traces = run / "trace"
        names |= {path.name for path in traces.iterdir()} if traces.is_dir() else set()
    if names:
        raise _taken(run)


def write_start(run: Path, machine: Machine | None, **config: Any) -> None:
    """Write what is known of a run at its start: its configuration, versions, and the machine.

    Args:
        run: the run's folder.
        machine: the Machine that is kept with the run; None writes none.
        config: fields of ``config.json`` (docs/reference/run-folder.md).

    Raises:
        StorageError: the folder cannot be written.
    """
    everything = {"version": CONFIG_VERSION, **config}
    commit_text(run / "config.json", json.dumps(everything, indent=1) + "\n")
    commit_text(run / "versions.json", json.dumps(versions(), indent=1) + "\n")
    if machine is not None:
        commit_text(run / "machine.json", machine.to_text())


def _taken(run: Path) -> DestinationExists:
    return DestinationExists(
        "the run's folder exists and is not empty",
        where=str(run),
        fix="Choose another with --out, or remove it; paceline run --again keeps an earlier "
        "attempt as RUN.1",
    )
