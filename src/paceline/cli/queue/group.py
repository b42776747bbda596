"""The group of ``paceline queue``: finds its subcommands."""

from __future__ import annotations

import click

from paceline.cli.lazy import LazyGroup

VERBS = {
    "simulate": "Play a trace of jobs against scheduling policies and compare them.",
    "serve": "Run the jobs of this machine's queue: the daemon.",
    "submit": "Put a command into the queue.",
    "ls": "List the jobs of the queue.",
    "why": "Say why a job waits, where it runs, or how it ended.",
    "cancel": "Take a job out of the queue; if it runs, stop it.",
    "replay": "Decide the log of a queue again, and compare.",
}


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    package="paceline.cli.queue",
    epilog="Example: paceline queue simulate jobs.csv --cluster 4x8 --policy all",
)
def queue() -> None:
    """Share a cluster between jobs."""
