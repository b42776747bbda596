"""The group of ``paceline queue``: finds its subcommands."""

from __future__ import annotations

import click

from paceline.cli.lazy import LazyGroup

VERBS = {
    "simulate": "Play a trace of jobs against scheduling policies and compare them.",
}


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    package="paceline.cli.queue",
    epilog="Example: paceline queue simulate jobs.csv --cluster 4x8 --policy all",
)
def queue() -> None:
    """Share a cluster between jobs."""
