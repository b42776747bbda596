"""``paceline doctor``: checks whether this machine is fit for training."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(epilog="Example: paceline doctor")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder with the training data [default: current directory].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.pass_context
def doctor(context: click.Context, folder: Path, as_json: bool) -> None:
    """Check whether this machine is fit for training, and say what to fix.

    Checks cores, memory, /dev/shm, the file system, torch, MPI, Slurm, GPUs and the clock.
    Exits with status 1 only if training cannot work on this machine.
    """
    from paceline.probe.doctor import diagnose

    findings = diagnose(folder)
    if as_json:
        rows = [
            {key: value for key, value in finding.to_json().items() if key != "version"}
            for finding in findings
        ]
        click.echo(json.dumps({"version": 1, "findings": rows}))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for finding in findings:
            status = click.style(f"{finding.status:>4}", fg=colours[finding.status])
            click.echo(f"{status}  {finding.topic:<12} {finding.what}")
            if finding.fix:
                click.echo(f"{'fix: ' + finding.fix:>{len(finding.fix) + 25}}")
    if any(finding.status == "fail" for finding in findings):
        context.exit(1)
