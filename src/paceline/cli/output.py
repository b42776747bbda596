"""What several commands print alike: ``run`` and ``record``, the ways of ``plan``."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from paceline.core.errors import PacelineError
    from paceline.core.plan_file import PlanFile
    from paceline.runs.result import RunResult


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """Send what the ranks print on stdout to stderr: with --json, stdout holds one object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def warn(warnings: Iterable[str]) -> None:
    """Print one line per warning."""
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def write_plan(out: Path | None, planned: PlanFile) -> None:
    """Write the plan file of ``paceline plan --out``, if one was asked for, and say so."""
    from paceline.core.files import commit_text

    if out is not None:
        commit_text(out, planned.to_text())
        click.echo(f"plan: wrote {out}", err=True)


def show_traceback(error: PacelineError, run: Path) -> None:
    """Print the traceback of the script, if it raised and the run failed for that."""
    from paceline.core.errors import ScriptFailed
    from paceline.launch.failures import first_traceback

    if isinstance(error, ScriptFailed) and (text := first_traceback(run)):
        click.echo(text, err=True)


def print_result(result: RunResult, run: Path, *, as_json: bool, recorded: bool) -> None:
    """Print the result of a run that ended well, and which commands say more about it."""
    from paceline.report.balance import balance_words, slow_node_lines
    from paceline.report.words import summary_line

    if as_json:
        click.echo(result.to_text(), nl=False)
    click.echo(summary_line(result, run), err=True)
    if words := balance_words(result.balance):
        click.echo(words, err=True)
    for line in slow_node_lines(result.balance):
        click.echo(line, err=True)
    if recorded:
        click.echo(f"next: paceline why {run}, paceline report {run}", err=True)
