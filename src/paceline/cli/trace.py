"""``paceline trace``: exports and summarises the traces of a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from paceline.cli.which_run import chosen_run, run_argument


@click.group(epilog="Example: paceline trace export RUN --format chrome")
def trace() -> None:
    """Summarise and export a run's traces."""


@trace.command(
    short_help="Write all ranks' events to one file.",
    epilog="Example: paceline trace export RUN --format chrome --out train.json",
)
@run_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(["chrome"]),
    default="chrome",
    show_default=True,
    help="chrome: JSON that ui.perfetto.dev opens.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="File to write [default: RUN/trace.json]."
)
def export(run: Path | None, form: str, out: Path | None) -> None:
    """Write the events of all ranks of RUN, on one clock, to one file.

    Without RUN, the newest run of the current folder, its subfolders and paceline-runs/ is taken.
    """
    from paceline.core.errors import DestinationExists, NotFound
    from paceline.core.files import commit_chunks
    from paceline.runs.folder import RunFolder
    from paceline.trace.chrome import chrome_json
    from paceline.trace.merge import load_run

    assert form == "chrome"
    folder = RunFolder.open(chosen_run(run)).path
    path = out or folder / "trace.json"
    if out is not None and out.exists():
        raise DestinationExists(
            "the file exists and is not overwritten", where=str(out), fix="Choose another file"
        )
    if not path.parent.is_dir():
        raise NotFound("no such folder", where=str(path.parent), fix="Make it first")
    commit_chunks(path, (piece.encode() for piece in chrome_json(load_run(folder))))
    click.echo(f"trace: {path}; open it at https://ui.perfetto.dev", err=True)


@trace.command(
    short_help="Print statistics of the traces of RUN.",
    epilog="Example: paceline trace stats RUN --json",
)
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def stats(run: Path | None, as_json: bool) -> None:
    """Print statistics of the traces of RUN: events by kind, time by phase, clocks, collectives.

    Without RUN, the newest run of the current folder, its subfolders and paceline-runs/ is taken.
    """
    from rich.console import Console

    from paceline.report.terminal import render_stats
    from paceline.runs.folder import RunFolder
    from paceline.trace.analysis import analyse
    from paceline.trace.analysis.stats import summarize_trace
    from paceline.trace.merge import load_run

    folder = RunFolder.open(chosen_run(run))
    found = summarize_trace(analyse(load_run(folder.path)))
    if as_json:
        state = str(folder.state())
        click.echo(json.dumps({"kind": "trace", "state": state, **found.to_json()}))
        return
    if words := folder.state_words():
        click.echo(words)
    Console(highlight=False).print(render_stats(found))


@trace.command(
    short_help="Print what a run waited for, and what would make it shorter.",
    epilog="Example: paceline trace efficiency RUN --step 12",
)
@run_argument
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="One step alone [default: all that every rank completed, without the first].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def efficiency(run: Path | None, step: int | None, as_json: bool) -> None:
    """Print why RUN is less efficient than its ranks.

    Shown are the efficiency of the run and its factors, what a step would take with free
    communication or balanced load, the critical path across ranks, wait states with who caused
    them, overlap of communication and compute, and the communication matrix.

    Without RUN, the newest run of the current folder, its subfolders and paceline-runs/ is taken.
    """
    from rich.console import Console

    from paceline.report.efficiency import render_efficiency
    from paceline.runs.folder import RunFolder
    from paceline.trace.analysis import analyse
    from paceline.trace.efficiency import measure_efficiency
    from paceline.trace.merge import load_run

    folder = RunFolder.open(chosen_run(run))
    found = measure_efficiency(analyse(load_run(folder.path)), step)
    if as_json:
        state = str(folder.state())
        click.echo(json.dumps({"kind": "efficiency", "state": state, **found.to_json()}))
        return
    if words := folder.state_words():
        click.echo(words)
    Console(highlight=False).print(render_efficiency(found))


@trace.command(
    short_help="Print what became slower from run A to run B.",
    epilog="Example: paceline trace compare before after",
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def compare(a: Path, b: Path, as_json: bool) -> None:
    """Print what became slower or faster from run A to run B, by phase, rank and operation.

    Each change has its 95 % interval and the probability that noise within the runs alone makes it.
    """
    from rich.console import Console

    from paceline.report.efficiency import render_run_comparison
    from paceline.runs.folder import RunFolder
    from paceline.trace.analysis import analyse
    from paceline.trace.efficiency import compare_runs
    from paceline.trace.merge import load_run

    analyses = [analyse(load_run(RunFolder.open(chosen_run(run)).path)) for run in (a, b)]
    found = compare_runs(*analyses)
    if as_json:
        click.echo(json.dumps({"kind": "comparison", **found.to_json()}))
        return
    Console(highlight=False).print(render_run_comparison(found))
