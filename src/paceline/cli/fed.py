"""``paceline fed``: training that is spread over institutions or devices."""

import click

from paceline.cli.fed_ledger import ledger


@click.group(epilog="Example: paceline fed ledger verify federation.db")
def fed() -> None:
    """Run federations, and check what their clients were paid."""


fed.add_command(ledger)
