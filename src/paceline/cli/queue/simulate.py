"""``paceline queue simulate``: policies on a trace of jobs, side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.queue.progress import shown_progress

if TYPE_CHECKING:
    from paceline.report.queue.model import QueueReport
    from paceline.scheduler.cluster import Cluster
    from paceline.scheduler.simulate.scenario import Durations

_LOG_BEGIN = b'{"policy": '
FORMATS = ("csv", "philly", "gavel", "muri", "sacct", "adaptdl")


def _durations(_context: click.Context, _option: click.Parameter, text: str) -> Durations:
    if text == "known":
        return "known"
    if text == "unknown":
        return "unknown"
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < 1000:
        raise click.BadParameter(
            f"'{text}' is neither known, unknown nor a factor of at least 1, such as 2"
        )
    return factor


@click.command(
    short_help="Play a trace of jobs against scheduling policies.",
    epilog="""\b
Example: paceline queue simulate jobs.csv --cluster 4x8 --policy all --out queue.html
  other traces:   those of Philly, Gavel, Muri and AdaptDL, and what sacct --parsable2 prints
  two types:      --cluster v100=2x4,k80=3x8
""",
)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Policy to simulate, or all; may be given several times [default: all].",
)
@click.option(
    "--cluster",
    metavar="TEXT|FILE",
    help="Nodes as [type=]NODESxDEVICES, separated by commas, or a JSON file of a Cluster "
    "[default: that of the published experiment, for traces of Gavel, Muri and AdaptDL].",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="Format of TRACE [default: by its first line].",
)
@click.option(
    "--rates",
    type=click.Path(path_type=Path),
    help="File of measured rates, for formats csv and gavel, or what paceline characterize wrote; "
    "folder of profiles for adaptdl.",
)
@click.option(
    "--objective",
    metavar="NAME",
    help="What policies that can choose optimise: jct, makespan, fairness or utilisation.",
)
@click.option(
    "--round",
    "round_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Let policies decide at multiples of this time only.",
)
@click.option(
    "--durations",
    callback=_durations,
    default="known",
    show_default=True,
    metavar="known|unknown|FACTOR",
    help="What policies have of each job's work: a FACTOR is by how much it is wrong at most.",
)
@click.option(
    "--rate-error",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    metavar="SHARE",
    help="Share by which the policies' rates are wrong at most [default: 0].",
)
@click.option(
    "--failures",
    "mtbf_h",
    type=click.FloatRange(min=0, min_open=True),
    metavar="HOURS",
    help="Mean time between failures of one node [default: none fails].",
)
@click.option(
    "--restart",
    "restart_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time that each restart of a job costs [default: the trace's].",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of errors and failures.")
@click.option("--jobs", "job_count", type=click.IntRange(min=1), help="Take the first N jobs only.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="HTML page to write; an older report there is replaced.",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    help="File to write every decision to, a JSON object a line; an older file is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def simulate(  # a flag for each field of a scenario
    trace: Path,
    policies: tuple[str, ...],
    cluster: str | None,
    file_format: str | None,
    rates: Path | None,
    objective: str | None,
    round_s: float | None,
    durations: Durations,
    rate_error: float,
    mtbf_h: float | None,
    restart_s: float | None,
    seed: int,
    job_count: int | None,
    out: Path | None,
    log: Path | None,
    as_json: bool,
) -> None:
    """Play the jobs of TRACE against scheduling policies on a simulated cluster.

    All policies see the same jobs, failures and errors. A job that can never run on the cluster is
    named with the reason and left out. Times in the table, in the page and in JSON are of the
    simulation.
    """
    from paceline.core.clock import SystemClock
    from paceline.core.files import check_replaceable, commit_chunks
    from paceline.report.page.document import prepare_page
    from paceline.scheduler.formats.read import detect_format, read_queue
    from paceline.scheduler.policies.choose import make_policies
    from paceline.scheduler.simulate.scenario import Scenario
    from paceline.scheduler.simulate.study import decision_lines, run_study, to_json, to_report

    if out is not None:  # rather than after minutes of simulating
        prepare_page(out)
    if log is not None:
        check_replaceable(
            log, _is_log, what="a log of decisions", fix="Name another file with --log"
        )
    chosen = make_policies(policies or ("all",), objective=objective, round_s=round_s)
    name = file_format or detect_format(trace)
    queue = read_queue(trace, file_format=name, rates=rates)
    if job_count is not None:
        queue = dataclasses.replace(queue, jobs=queue.jobs[:job_count])
    scenario = Scenario(
        durations=durations,
        rate_error=rate_error,
        node_mtbf_s=(mtbf_h or 0.0) * 3600,
        restart_s=restart_s,
        seed=seed,
    )
    names = [policy.name for policy in chosen]
    with shown_progress(names, len(queue.jobs), SystemClock()) as on_progress:
        study = run_study(
            str(trace),
            queue,
            _cluster(cluster, name),
            chosen,
            scenario,
            log=bool(out or log),
            on_progress=on_progress,
        )
    if log is not None:
        commit_chunks(log, (line.encode() for line in decision_lines(study)))
        click.echo(f"simulate: wrote {log}", err=True)
    if as_json:
        click.echo(json.dumps(to_json(study)))
    if out is not None or not as_json:
        _show(to_report(study), out, on_terminal=not as_json)


def _cluster(text: str | None, file_format: str) -> Cluster:
    """Return the cluster that a text or a JSON file describes, else that of the format."""
    from paceline.core.errors import UsageError
    from paceline.core.files import read_text
    from paceline.scheduler.cluster import Cluster
    from paceline.scheduler.formats.read import FORMATS

    text = text or FORMATS[file_format].cluster
    if not text:
        raise UsageError(
            f"a trace of the format {file_format} needs a cluster",
            fix="Give --cluster [type=]NODESxDEVICES, for example --cluster 4x8",
        )
    if Path(text).suffix == ".json" or Path(text).is_file():
        return Cluster.from_text(read_text(Path(text)), where=text)
    return Cluster.of_text(text)


def _is_log(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.read(len(_LOG_BEGIN))
    return first in (_LOG_BEGIN, b"")


def _show(report: QueueReport, out: Path | None, *, on_terminal: bool) -> None:
    if on_terminal:
        from rich.console import Console

        from paceline.report.queue.terminal import render_queue

        Console(highlight=False).print(render_queue(report))
    if out is not None:
        from paceline.report.queue.page import write_queue_page

        write_queue_page(report, out)
        click.echo(f"simulate: wrote {out}", err=True)
