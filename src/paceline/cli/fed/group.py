"""The group of ``paceline fed``: finds its subcommands."""

from __future__ import annotations

import click

from paceline.cli.lazy import LazyGroup

VERBS = {
    "simulate": "Train a federation of simulated clients; compare strategies.",
}


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    package="paceline.cli.fed",
    epilog="Example: paceline fed simulate federation.toml --strategy all",
)
def fed() -> None:
    """Train on data that stays with its owners."""
