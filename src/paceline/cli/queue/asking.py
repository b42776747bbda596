"""What the subcommands that ask a queue's daemon share."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.report.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.record import Record
    from paceline.scheduler.local.jobs.records import JobView
    from paceline.scheduler.local.paths import QueuePaths
    from paceline.scheduler.local.protocol.messages import Reply, Request

_HEAD = ("JOB", "STATUS", "DEVICES", "STARTS", "SINCE SUBMISSION", "PROGRESS", "REASON")


def dir_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option that names a queue."""
    return click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path),
        help="Folder of the queue [default: the user's own, in XDG_STATE_HOME].",
    )(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option that prints JSON."""
    help_text = "Print one JSON object on stdout."
    return click.option("--json", "as_json", is_flag=True, help=help_text)(command)


def find_paths(folder: Path | None) -> QueuePaths:
    """Return the files of the queue that the user means."""
    from paceline.core.config import environment
    from paceline.scheduler.local.paths import queue_paths

    return queue_paths(folder, environment())


def ask_daemon(folder: Path | None, request: Request, *, absent_s: float = 0.0) -> Reply:
    """Return the answer of a queue's daemon; arguments and errors as in `client.ask`."""
    from paceline.core.clock import SystemClock
    from paceline.scheduler.local.protocol.client import ask

    return ask(find_paths(folder), request, SystemClock(), absent_s=absent_s)


def print_json(record: Record) -> None:
    """Print a record as one line."""
    click.echo(json.dumps(record.to_json()))


def print_jobs(jobs: tuple[JobView, ...], now_s: float) -> None:
    """Print a table of jobs."""
    rows = [_HEAD, *(_row(job, now_s) for job in jobs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join((*cells, row[-1])).rstrip())


def _row(job: JobView, now_s: float) -> tuple[str, ...]:
    progress = f"{job.work_done:g}" + (f" of {job.work:g}" if job.work else "")
    return (
        job.name,
        job.status,
        job.where or str(job.devices),
        str(job.starts),
        format_seconds(max(0.0, (job.ended_s or now_s) - job.submitted_s)),
        progress if job.work_done or job.work else "-",
        job.reason.partition("\n")[0],
    )


def describe(job: JobView) -> list[str]:
    """Return lines about a job that has ended, or is asked about."""
    lines = [line for line in job.reason.splitlines()[1:] if line]
    if job.ended_s is not None:
        at = datetime.datetime.fromtimestamp(job.ended_s).astimezone()
        lines.insert(0, f"ended {at:%Y-%m-%d %H:%M:%S}, starts: {job.starts}")
    if job.log:
        lines.append(f"log: {job.log}")
    return lines
