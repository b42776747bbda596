"""``paceline record``: the ranks of another launcher, recorded."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.core.plan import CollectivesChoice
    from paceline.launch.record import RecordedCommand


@click.command(
    context_settings={"allow_interspersed_args": False},  # what follows the command is its own
    epilog="""\b
Example: paceline record -- torchrun --nproc-per-node 2 train.py
  accelerate:   paceline record -- accelerate launch --num_processes 2 train.py
  own ranks:    paceline record --out run1 -- python train.py
  MPI:          paceline record -- mpirun -n 4 ./program
""",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the files of the run.")
@click.option(
    "--machine",
    type=click.Path(path_type=Path),
    help="Machine file (from paceline probe) to store in the run's folder.",
)
@click.option(
    "--collectives",
    type=click.Choice(["torch", "paceline"]),
    default="torch",
    help="Backend of the ranks' collectives, as for paceline run [default: torch].",
)
@click.option(
    "--mpi",
    is_flag=True,
    help="COMMAND starts a program that uses MPI, whose calls are recorded; needed where the "
    "program is a script: of an executable it is found out.",
)
@click.option(
    "--record-io/--no-record-io",
    default=None,
    help="Record calls for files, too, as for paceline run [default: only of MPI programs].",
)
@click.option(
    "--profile-steps",
    type=int,
    metavar="N",
    default=0,
    help="Have torch.profiler add the operators and kernels of N steps, as for paceline run.",
)
@click.option(
    "--hang-timeout",
    metavar="SECONDS",
    default="300",
    help="End the run, and name the rank, when others wait this long for one that shows no sign of "
    "work; off: never [default: 300].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option("--dry-run", is_flag=True, help="Print the run's folder; start nothing.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def record(
    out: Path | None,
    machine: Path | None,
    collectives: CollectivesChoice,
    mpi: bool,
    record_io: bool | None,
    profile_steps: int,
    hang_timeout: str,
    as_json: bool,
    dry_run: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, which starts ranks by itself, and record where their time goes.

    COMMAND stays as it is: torchrun, accelerate launch, deepspeed, a script that spawns its ranks.
    Every Python process below it is a rank once it has joined a process group of torch, or runs a
    backward pass without a process group; so is every process of a program that uses MPI, in any
    language. The run's folder has the files that paceline run writes.
    """
    click.echo(f"paceline record: {command[0]}", err=True)
    from paceline.core.clock import SystemClock
    from paceline.core.config import parse_seconds
    from paceline.launch.record import prepare_command

    clock = SystemClock()
    job = prepare_command(
        command,
        out,
        clock,
        collectives=collectives,
        mpi=mpi,
        record_io=record_io,
        profile_steps=profile_steps,
        hang_timeout_s=parse_seconds(hang_timeout),
    )
    if job.mpi is not None:
        click.echo(f"paceline record: MPI {job.mpi.interface} {job.mpi.library}", err=True)
    run_recorded(job, machine, as_json=as_json, dry_run=dry_run)


def run_recorded(
    job: RecordedCommand, machine: Path | None, *, as_json: bool, dry_run: bool
) -> None:
    """Run a prepared command to its end, and print the result."""
    from paceline.cli.output import print_result, show_traceback, stdout_as_stderr, warn
    from paceline.core.clock import SystemClock
    from paceline.core.errors import PacelineError
    from paceline.launch.record import claim_command_folder, record_command
    from paceline.launch.summary import recording_warnings, trace_warnings
    from paceline.probe.machine_file import known_machine

    described = known_machine(machine)
    job = job if dry_run else claim_command_folder(job)
    click.echo(f"paceline record: writing {job.run_folder}", err=True)
    if dry_run:
        return
    try:
        with stdout_as_stderr() if as_json else contextlib.nullcontext():
            result = record_command(job, machine=described, clock=SystemClock())
    except PacelineError as error:
        show_traceback(error, job.run_folder)
        raise
    finally:
        warn((*trace_warnings(job.run_folder), *recording_warnings(job.run_folder)))
    print_result(result, job.run_folder, as_json=as_json, recorded=bool(result.ranks))
