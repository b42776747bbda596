"""``paceline why``: which rank was late in a run, and why."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(epilog="Example: paceline why paceline-runs/train-20260101-120000")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def why(run: Path, as_json: bool) -> None:
    """Say in one or two sentences which rank was late in RUN, when and why, or that none was."""
    from paceline.report.model import gather, to_json
    from paceline.report.words import printable

    report = gather(run)
    if as_json:
        everything = to_json(report)
        names = ("version", "run", "state", "verdict", "exit_code", "failure", "stragglers")
        click.echo(json.dumps({"kind": "why", **{name: everything[name] for name in names}}))
        return
    click.echo(printable(report.words))
