"""The argument RUN of commands that read a run: optional, since most look at the newest one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def run_argument(command: F) -> F:
    """Give `command` the argument RUN; without it, `chosen_run` takes the newest run."""
    return click.argument("run", metavar="[RUN]", required=False, type=click.Path(path_type=Path))(
        command
    )


def chosen_run(run: Path | None) -> Path:
    """Return `run`, or the newest run here, which is then named on stderr.

    Raises:
        NotFound: there is no run here, or `run` is a folder of runs.
    """
    from paceline.runs.newest import newest_run, refuse_folder_of_runs

    if run is not None:
        refuse_folder_of_runs(run)
        return run
    newest = newest_run(Path())
    click.echo(f"run: {newest} (the newest one here)", err=True)
    return newest
