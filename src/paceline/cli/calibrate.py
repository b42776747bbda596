"""``paceline calibrate``: corrects a machine file by a run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="Example: paceline calibrate paceline-demo --out machine.json")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--machine",
    type=click.Path(path_type=Path),
    help="Machine file to correct [default: machine.json in RUN].",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="File to write the corrected machine to; an older machine file there is replaced.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the predicted, measured and fitted time of each phase as JSON on stdout.",
)
def calibrate(run: Path, machine: Path | None, out: Path, as_json: bool) -> None:
    """Correct the figures of a machine file by RUN, which followed a plan.

    Rates and overheads are scaled to the measured time of each phase, weighted by how precisely the
    run shows it. Steps of the warm-up, and steps in which a rank was late, are left out. Plan the
    next run with --machine OUT, and pass the same --machine to that run.
    """
    from paceline.core.file_kind import FileKind, prepare_output
    from paceline.core.files import commit_text
    from paceline.probe.machine_file import load_machine
    from paceline.runs.folder import RunFolder
    from paceline.studies.calibrate import calibrate_by_run

    prepare_output(out, FileKind.MACHINE)
    prior = load_machine(machine or RunFolder.open(run).file("machine.json"))
    better, calibration = calibrate_by_run(prior, run)
    commit_text(out, better.to_text())
    click.echo(f"calibrate: wrote {out}", err=True)
    if as_json:
        click.echo(calibration.to_text(), nl=False)
    else:
        from rich.console import Console

        from paceline.report.terminal import render_calibration

        Console(highlight=False).print(render_calibration(calibration))
