"""``paceline queue why``: what a job waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paceline.cli.queue.asking import ask_daemon, describe, dir_option, json_option, print_json

if TYPE_CHECKING:
    from pathlib import Path


@click.command(epilog="Example: paceline queue why train-3")
@dir_option
@json_option
@click.argument("job")
def why(folder: Path | None, as_json: bool, job: str) -> None:
    """Say why JOB waits, where it runs, or how it ended."""
    from paceline.scheduler.local.protocol.messages import Request

    reply = ask_daemon(folder, Request(verb="why", name=job))
    if as_json:
        print_json(reply)
        return
    click.echo(f"{job}: {reply.text}")
    for line in describe(reply.jobs[0]):
        click.echo(f"  {line}")
