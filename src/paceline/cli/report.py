"""``paceline report``: the report of a run, on the terminal and as an HTML page."""

from __future__ import annotations

import json
from pathlib import Path

import click

from paceline.cli.which_run import chosen_run, run_argument


@click.command(epilog="Example: paceline report paceline-demo --out demo.html")
@run_argument
@click.option(
    "--out", type=click.Path(path_type=Path), help="HTML file to write [default: RUN/report.html]."
)
@click.option(
    "--before",
    type=click.Path(path_type=Path),
    help="A former run, with other settings: what these brought is said, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def report(run: Path | None, out: Path | None, before: Path | None, as_json: bool) -> None:
    """Print a summary of RUN, and write its report as one self-contained HTML page.

    The page has the verdict, what would help, time by phase, what each rank did when, skew, waits
    and who caused them, what remedies would bring, step time, prediction against measurement,
    collectives, traffic between ranks, memory, and the settings, versions, machine and clocks of
    the run.
    Without RUN, the newest run of the current folder, its subfolders and paceline-runs/ is taken.
    """
    from rich.console import Console

    from paceline.report.model import gather, to_json
    from paceline.report.page.document import write_html
    from paceline.report.remedies import RemedyQuestion
    from paceline.report.terminal import render_terminal

    question = RemedyQuestion(before=before) if before is not None else None
    gathered = gather(chosen_run(run), in_detail=True, question=question)
    page = out or gathered.run / "report.html"
    write_html(gathered, page)
    if as_json:
        click.echo(json.dumps({**to_json(gathered), "report": str(page)}))
        return
    Console(highlight=False).print(render_terminal(gathered))
    click.echo(f"report: {page}", err=True)
