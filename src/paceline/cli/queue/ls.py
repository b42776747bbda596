"""``paceline queue ls``: the jobs of a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paceline.cli.queue.asking import ask_daemon, dir_option, json_option, print_jobs, print_json

if TYPE_CHECKING:
    from pathlib import Path


@click.command(epilog="Example: paceline queue ls --all")
@dir_option
@click.option("-a", "--all", "ended", is_flag=True, help="Also jobs that have ended.")
@json_option
def ls(folder: Path | None, ended: bool, as_json: bool) -> None:
    """List the jobs of the queue: where they run, or why they do not."""
    from paceline.core.clock import SystemClock
    from paceline.scheduler.local.protocol.messages import Request

    reply = ask_daemon(folder, Request(verb="list", ended=ended))
    if as_json:
        print_json(reply)
        return
    print_jobs(reply.jobs, SystemClock().wall_s())
