"""``paceline trace``: exports and summarises the traces of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.output import warn
from paceline.cli.streams import terminal
from paceline.cli.which_run import chosen_run, run_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.trace.export.source import ExportSummary

_LINE_INTERVAL_S = 5.0


@click.group(epilog="Example: paceline trace export RUN --format chrome")
def trace() -> None:
    """Summarise and export a run's traces."""


# Where a format is written within the run's folder, and what opens it.
_FORMATS = {
    "chrome": ("trace.json", "open it at https://ui.perfetto.dev"),
    "otf2": ("otf2", "open it with Vampir, Scalasca or otf2-print"),
    "parquet": ("trace.parquet", "a row per event"),
    "csv": ("trace.csv", "a row per event"),
    "chakra": ("chakra", "a graph per rank, for ASTRA-sim and other simulators"),
}


@trace.command(
    short_help="Write all ranks' events for other tools.",
    epilog="Example: paceline trace export RUN --format otf2 --out train",
)
@run_argument
@click.option(
    "--format",
    "form",
    type=click.Choice(list(_FORMATS)),
    default="chrome",
    show_default=True,
    help="chrome: JSON that ui.perfetto.dev opens. otf2: an archive for Vampir, Scalasca, Cube "
    "(needs paceline[otf2]). parquet, csv: a table with a row per event (parquet needs "
    "paceline[parquet]). chakra: a graph per rank for simulators.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write; folder for otf2 and chakra [default: in RUN, replaced if it is there].",
)
@click.option("--no-counters", is_flag=True, help="Leave counters out: some readers fail at them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def export(run: Path | None, form: str, out: Path | None, no_counters: bool, as_json: bool) -> None:
    """Write the events of all ranks of RUN, on one clock, in the format of another tool.

    Without RUN, the newest run of the current folder, its subfolders and paceline-runs/ is taken.
    """
    from paceline.core.errors import DestinationExists, NotFound
    from paceline.runs.folder import RunFolder

    folder = RunFolder.open(chosen_run(run)).path
    name, reader = _FORMATS[form]
    path = out or folder / name
    if out is not None and out.exists():
        raise DestinationExists(
            "it exists and is not overwritten", where=str(out), fix="Choose another name"
        )
    if not path.parent.is_dir():
        raise NotFound("no such folder", where=str(path.parent), fix="Make it first")
    done = _write(form, folder, path, counters=not no_counters)
    warn(done.cautions)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "kind": "export",
                    "version": 1,
                    "format": form,
                    "path": str(done.path),
                    "ranks": done.ranks,
                    "events": done.events,
                    "cautions": done.cautions,
                }
            )
        )
    click.echo(f"trace: {done.path}; {reader}", err=True)


def _write(form: str, run: Path, path: Path, *, counters: bool) -> ExportSummary:
    """Write a run in one of the formats; where messages need not be matched, rank by rank."""
    from paceline.trace import export as formats
    from paceline.trace.merge import load_run
    from paceline.trace.merge.windows import SpooledRun

    if form in ("chrome", "chakra"):
        merged = load_run(run)
        with _rank_progress(len(merged.ranks)) as on_rank:
            if form == "chakra":  # it has no counters
                return formats.write_chakra(merged, path, on_rank=on_rank)
            return formats.write_chrome(merged, path, counters=counters, on_rank=on_rank)
    write = {
        "otf2": formats.write_otf2,
        "parquet": formats.write_parquet,
        "csv": formats.write_csv,
    }[form]
    with SpooledRun(run) as spooled, _rank_progress(len(spooled.ranks)) as on_rank:
        return write(formats.SpooledSource(spooled), path, counters=counters, on_rank=on_rank)


@contextlib.contextmanager
def _rank_progress(ranks: int) -> Iterator[Callable[[int], None]]:
    """Yield a callback that shows how many ranks are written: a bar on a terminal, else lines."""
    from paceline.core.clock import SystemClock

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=terminal()), transient=True) as bar:
            task = bar.add_task("exporting ranks", total=ranks)
            yield lambda done: bar.update(task, completed=done)
        return
    clock = SystemClock()
    shown_s = clock.now_s()

    def show(done: int) -> None:
        nonlocal shown_s
        if clock.now_s() - shown_s >= _LINE_INTERVAL_S:
            shown_s = clock.now_s()
            click.echo(f"exporting: {done} of {ranks} ranks", err=True)

    yield show


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
    from paceline.trace.efficiency import measure_run

    folder = RunFolder.open(chosen_run(run))
    found = measure_run(folder.path, step)
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
    Runs of unlike programs or models are compared, too, and said to be so.
    """
    from rich.console import Console

    from paceline.report.comparable import unlike_runs
    from paceline.report.efficiency import render_run_comparison
    from paceline.runs.folder import RunFolder
    from paceline.trace.efficiency import compare_series, read_series

    folders = [RunFolder.open(chosen_run(run)) for run in (a, b)]
    first, second = map(read_series, (folder.path for folder in folders), ("run A", "run B"))
    configs = (folder.read_config() for folder in folders)
    found = dataclasses.replace(
        compare_series(first, second), unlike=unlike_runs(first, second, *configs)
    )
    if as_json:
        click.echo(json.dumps({"kind": "comparison", **found.to_json()}))
        return
    Console(highlight=False).print(render_run_comparison(found))
