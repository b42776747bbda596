"""``paceline probe``: measures this machine."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="Example: paceline probe --out machine.json")
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
    metavar="RANKS",
    help="Measure collectives of so many ranks only (as 2,4), and add them to the machine file.",
)
@click.option("--quick", is_flag=True, help="Rougher, in about a third of the time.")
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
    from paceline.probe.machine_file import load_machine, machine_path
    from paceline.probe.measure import measure, measure_collectives, summary, with_collectives

    path = out or machine_path()
    if out is None:
        prepare_file(path)  # rather than after 20 seconds of measuring
    else:
        prepare_output(out, FileKind.MACHINE)
    if collective_ranks is None:
        machine = measure(folder, quick=quick, on_progress=_progress)
    else:
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
