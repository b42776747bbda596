"""The group of ``paceline fed``: finds its subcommands."""

from __future__ import annotations

import os

import click

from paceline.cli.lazy import LazyGroup

VERBS = {
    "run": "Train one federation; score and pay its clients.",
    "simulate": "Train a federation of simulated clients; compare strategies.",
    "ledger": "Verify, export and read the ledger of a federation's tokens.",
}


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    package="paceline.cli.fed",
    epilog="Example: paceline fed simulate federation.toml --strategy all",
)
def fed() -> None:
    """Train on data that stays with its owners."""
    # Before NumPy is loaded: its threads cost more than they gain on matrices as small as these.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
