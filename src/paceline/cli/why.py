"""``paceline why``: which rank was late in a run, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from paceline.cli.which_run import chosen_run, run_argument

if TYPE_CHECKING:
    from pathlib import Path


@click.command(epilog="Example: paceline why paceline-runs/train-20260101-120000")
@run_argument
@click.option(
    "--verbose",
    is_flag=True,
    help="Add tables: stragglers, time by phase, loader, host work, files.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def why(run: Path | None, verbose: bool, as_json: bool) -> None:
    """Say which rank was late in RUN, when and why, or that none was, and what would help.

    Without RUN, the newest run of the current folder, its subfolders and paceline-runs/ is taken.
    """
    from rich.console import Console

    from paceline.report.model import gather, to_json
    from paceline.report.terminal import render_details, render_why

    report = gather(chosen_run(run))
    if as_json:
        everything = to_json(report)
        names = ["version", "run", "state", "verdict", "cautions", "advice"]
        names += ["exit_code", "failure", "nan", "step_rule", "stragglers", "shifts", "host_work"]
        names += ["loader_stages_s", "collective_paths", "pipeline", "bubble", "spilling"]
        names += ["data", "files"]
        click.echo(json.dumps({"kind": "why", **{name: everything[name] for name in names}}))
        return
    console = Console(highlight=False)
    # Programs that read a pipe get a sentence per line; a terminal would break words at its edge.
    console.print(render_why(report), soft_wrap=not console.file.isatty())
    if verbose:
        console.print(render_details(report))
