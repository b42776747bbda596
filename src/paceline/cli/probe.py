"""``paceline probe``: measures this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.machine import Machine

_OF_JOB = "job"


@click.command(
    epilog="""\b
Example: paceline probe --out machine.json
  4 ranks of this host:    paceline probe --collectives 4
  between hosts of a job:  srun paceline probe --collectives
"""
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write; an older machine file there is replaced [default: in the user's cache].",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder whose storage is measured [default: current directory].",
)
@click.option(
    "--collectives",
    "collective_ranks",
    metavar="[RANKS]",
    is_flag=False,
    flag_value=_OF_JOB,
    help="Measure collectives only, and add them to the machine file: of so many ranks of this "
    "host (as 2,4), or without RANKS between the hosts of the job whose rank this process is.",
)
@click.option("--quick", is_flag=True, help="Rougher, in about half the time.")
@click.option("--json", "as_json", is_flag=True, help="Print the machine as JSON on stdout.")
def probe(
    out: Path | None, folder: Path, collective_ranks: str | None, quick: bool, as_json: bool
) -> None:
    """Measure this machine: compute, memory, links between processes, storage.

    Takes about 20 seconds on an idle machine, and longer on a busy one: run nothing else meanwhile.
    Parts that other processes disturb are measured again, which is said; what stays disturbed is
    named. `paceline plan` predicts from the result.
    """
    from paceline.core.file_kind import FileKind, prepare_output
    from paceline.core.files import commit_text, prepare_file
    from paceline.core.machine_file import machine_path
    from paceline.probe.machine_file import load_machine
    from paceline.probe.measure import measure, measure_collectives, summary, with_collectives

    path = out or machine_path()

    def prepare() -> None:  # rather than after 20 seconds of measuring
        prepare_output(path, FileKind.MACHINE) if out else prepare_file(path)

    if collective_ranks == _OF_JOB:
        machine = _probe_job(path, prepare, quick=quick)
        if machine is None:  # rank 0 writes
            return
    elif collective_ranks is None:
        prepare()
        machine = measure(folder, quick=quick, on_progress=_progress)
    else:
        prepare()
        counts = _rank_counts(collective_ranks)
        known = load_machine(out if out is not None and out.exists() else None)
        costs = measure_collectives(counts, quick=quick, on_progress=_progress)
        machine = with_collectives(known, costs)
    commit_text(path, machine.to_text())
    click.echo(f"probe: wrote {path}", err=True)
    if as_json:
        click.echo(machine.to_text(), nl=False)
        return
    for line in summary(machine):
        click.echo(line)


def _probe_job(path: Path, prepare: Callable[[], None], *, quick: bool) -> Machine | None:
    """Return rank 0's machine with costs between the job's hosts; None on other ranks.

    What is wrong with the job or its machine file rank 0 says for all ranks.
    """
    from paceline.cli.job import find_job
    from paceline.core.config import environment
    from paceline.core.errors import Missing, UsageError
    from paceline.probe.machine_file import known_machine
    from paceline.probe.measure import with_collectives

    place = find_job(environment())
    speaks = place.rank == 0
    try:
        from paceline.probe.between_hosts import measure_between_hosts
    except ImportError as problem:
        raise Missing("torch is not installed", fix="pip install 'paceline[torch]'") from problem

    def read() -> Machine:
        prepare()
        return known_machine(path if path.exists() else None)

    try:
        known, costs = measure_between_hosts(
            *(place, read), quick=quick, on_progress=_progress if speaks else lambda text: None
        )
    except UsageError:
        if speaks:
            raise
        # All ranks raise it. A launcher ends a job by the first rank that fails: that must not
        # happen before rank 0 has said why, so rank 0 alone fails.
        return None
    return with_collectives(known, costs) if known else None


def _rank_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in ``2,4``."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 2:
        raise click.BadParameter(
            f"'{text}' is not a list of numbers of ranks, each at least 2, as 2,4",
            param_hint="--collectives",
        )
    return counts


def _progress(text: str) -> None:
    click.echo(f"probe: {text}", err=True)
