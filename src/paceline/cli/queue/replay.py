"""``paceline queue replay``: decides the log of a queue again."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from paceline.cli.queue.asking import json_option, print_json


@click.command(epilog="Example: paceline queue replay ~/.local/state/paceline/queue/queue.db")
@click.argument("log", type=click.Path(path_type=Path))
@json_option
def replay(log: Path, as_json: bool) -> None:
    """Pass the logged events of LOG to its policy again; the decisions must be the same.

    LOG is the file queue.db of a queue, or the queue's folder. Each decision is compared in full,
    with the digest of its inputs; the first that differs is printed, and the exit code is 1.
    """
    from paceline.scheduler.local.paths import DATABASE
    from paceline.scheduler.local.queue.replay import replay as decide_again

    outcome = decide_again(log / DATABASE if log.is_dir() else log)
    if as_json:
        print_json(outcome)
    else:
        counts = f"{outcome.events} events, {outcome.decisions} decisions, {outcome.segments} parts"
        click.echo(f"{counts}: {'different' if outcome.difference else 'the same decisions'}")
        if found := outcome.difference:
            click.echo(
                f"  first in part {found.segment}, event {found.event}, at {found.at_s:.3f} s"
            )
            click.echo(f"  logged:  {found.logged or 'nothing'}")
            click.echo(f"  decided: {found.decided or 'nothing'}")
    if outcome.difference:
        sys.exit(1)
