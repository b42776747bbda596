"""``paceline report``: the report of a run, on the terminal and as an HTML page."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(epilog="Example: paceline report paceline-demo --out demo.html")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="HTML file to write [default: RUN/report.html]."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def report(run: Path, out: Path | None, as_json: bool) -> None:
    """Print a summary of RUN, and write its report as one self-contained HTML page.

    The page has the verdict, time by phase, skew, collectives, memory, prediction against
    measurement, and the provenance of the numbers.
    """
    from rich.console import Console

    from paceline.report.html import write_html
    from paceline.report.model import gather, to_json
    from paceline.report.terminal import render_terminal

    gathered = gather(run)
    page = out or gathered.run / "report.html"
    write_html(gathered, page)
    if as_json:
        click.echo(json.dumps({**to_json(gathered), "report": str(page)}))
        return
    Console(highlight=False).print(render_terminal(gathered))
    click.echo(f"report: {page}", err=True)
