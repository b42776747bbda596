"""Which run a command means that names none: the newest one here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import NotFound, PacelineError
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULT_PARENT = "paceline-runs"  # of runs without --out


def newest_run(folder: Path) -> Path:
    """Return the run in or below `folder` that was started last, of those that recorded anything.

    Runs are looked for in `folder` itself, in its subfolders, where ``--out RUN`` puts them, and in
    ``paceline-runs``. A run starts when its ``config.json`` is written. One in which no rank left a
    trace, as of a command that was mistyped, is taken only where there is no other.

    Raises:
        NotFound: there is no run.
    """
    runs = list(_runs(folder))
    if not runs:
        raise NotFound(
            "no run here",
            where=str(folder.resolve()),
            why=f"neither this folder, nor its subfolders, nor {DEFAULT_PARENT}/ hold a run",
            fix="Name the folder of a run, or make one: paceline run script.py",
        )
    return max(runs)[-1]


def refuse_folder_of_runs(folder: Path) -> None:
    """Raise if `folder` is not a run, but holds runs; do nothing otherwise.

    Raises:
        NotFound: the error names the newest of the runs.
    """
    if not folder.is_dir() or RunFolder.open(folder).trace.is_dir():
        return
    runs = list(_runs(folder))
    if runs:
        raise NotFound(
            "not the folder of a run",
            where=str(folder),
            why=f"it holds {len(runs)} run{'s' * (len(runs) > 1)}",
            fix=f"Name one of them; the newest is {max(runs)[-1]}",
        )


def _runs(folder: Path) -> Iterator[tuple[bool, int, Path]]:
    """Yield each run with whether it recorded anything, and the time at which it was started."""
    for path in (folder, *_subfolders(folder), *_subfolders(folder / DEFAULT_PARENT)):
        try:
            config = RunFolder.open(path).file("config.json")
            started_ns = config.stat().st_mtime_ns
            is_run = (config.parent / "trace").is_dir()
            has_traces = any((config.parent / "trace").iterdir()) if is_run else False
        except (OSError, PacelineError):  # not a run, not ours to read, or being removed
            continue
        if is_run:
            yield has_traces, started_ns, path


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # there is none, or it must not be listed
        return []
