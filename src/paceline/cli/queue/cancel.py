"""``paceline queue cancel``: takes jobs out of a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paceline.cli.queue.asking import ask_daemon, dir_option, json_option, print_json

if TYPE_CHECKING:
    from pathlib import Path


@click.command(epilog="Example: paceline queue cancel train-3")
@dir_option
@json_option
@click.argument("job")
def cancel(folder: Path | None, as_json: bool, job: str) -> None:
    """Take JOB out of the queue; if it runs, it gets SIGTERM, and SIGKILL after its grace period.

    A job that has ended stays as it is.
    """
    from paceline.scheduler.local.protocol.messages import Request

    view = ask_daemon(folder, Request(verb="cancel", name=job)).jobs[0]
    if as_json:
        print_json(view)
        return
    click.echo(f"{view.name}: {view.status}" + (f" ({view.reason})" if view.reason else ""))
