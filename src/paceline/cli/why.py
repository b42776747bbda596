"""``paceline why``: which rank was late in a run, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from paceline.cli.which_run import chosen_run, run_argument


@click.command(
    epilog="""\b
Example: paceline why paceline-runs/train-20260101-120000
  remedies: paceline why RUN --remedies --ranks 24576
"""
)
@run_argument
@click.option(
    "--verbose",
    is_flag=True,
    help="Add tables: stragglers, time by phase, loader, host work, files.",
)
@click.option(
    "--remedies",
    is_flag=True,
    help="Add what a CPU budget, paced input and rebalancing would bring, at up to 24,576 ranks.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    multiple=True,
    help="With --remedies: at this number of ranks; may be repeated.",
)
@click.option(
    "--tail",
    type=click.Choice(["measured", "pareto"]),
    default="measured",
    show_default=True,
    help="With --remedies: whether ranks can be slower than all that were measured.",
)
@click.option(
    "--before",
    type=click.Path(path_type=Path),
    help="With --remedies: a former run, with other settings: what these brought.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def why(
    run: Path | None,
    verbose: bool,
    remedies: bool,
    ranks: tuple[int, ...],
    tail: Literal["measured", "pareto"],
    before: Path | None,
    as_json: bool,
) -> None:
    """Say which rank was late in RUN, when and why, or that none was, and what would help.

    Without RUN, the newest run of the current folder, its subfolders and paceline-runs/ is taken.
    """
    from rich.console import Console

    from paceline.core.errors import UsageError
    from paceline.perf.imbalance import ForecastSettings
    from paceline.report.model import gather, to_json
    from paceline.report.remedies import RemedyQuestion, render_remedies
    from paceline.report.terminal import render_details, render_why

    if not remedies and (ranks or before is not None or tail != "measured"):
        raise UsageError(
            "--ranks, --tail and --before are about remedies",
            fix="Give --remedies, too",
        )
    question = None
    if remedies:
        question = RemedyQuestion(ranks or None, ForecastSettings(tail=tail), before)
    report = gather(chosen_run(run), question=question)
    if as_json:
        everything = to_json(report)
        names = ["version", "run", "state", "verdict", "cautions", "advice"]
        names += ["exit_code", "failure", "nan", "step_rule", "stragglers", "shifts", "host_work"]
        names += ["loader_stages_s", "collective_paths", "pipeline", "bubble", "spilling"]
        names += ["balance", "data", "files", "loader", "tuned", "remedies", "remedy_outcome"]
        click.echo(json.dumps({"kind": "why", **{name: everything[name] for name in names}}))
        return
    console = Console(highlight=False)
    # Programs that read a pipe get a sentence per line; a terminal would break words at its edge.
    console.print(render_why(report), soft_wrap=not console.file.isatty())
    if remedies:
        console.print()
        console.print(render_remedies(*report.remedies))
    if verbose:
        console.print(render_details(report))
