"""``paceline doctor``: what this machine offers a training job, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(epilog="Example: paceline doctor")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder that data are read from [default: the working one].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.pass_context
def doctor(context: click.Context, folder: Path, as_json: bool) -> None:
    """Check what this machine offers a training job, and say what to do.

    Looks at cores, memory, /dev/shm, the file system, torch, MPI, Slurm, GPUs and the clock.
    Ends with 1 only when training here cannot work.
    """
    from paceline.probe.doctor import diagnose

    findings = diagnose(folder)
    if as_json:
        rows = [{k: v for k, v in one.to_json().items() if k != "version"} for one in findings]
        click.echo(json.dumps({"version": 1, "findings": rows}))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for one in findings:
            status = click.style(f"{one.status:>4}", fg=colours[one.status])
            click.echo(f"{status}  {one.topic:<12} {one.what}")
            if one.fix:
                click.echo(f"{'do: ' + one.fix:>{len(one.fix) + 24}}")
    if any(one.status == "fail" for one in findings):
        context.exit(1)
