"""``paceline run``: a script on its ranks, recorded."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@click.command(
    context_settings={"allow_interspersed_args": False},  # what follows SCRIPT is the script's
    epilog="Example: paceline run -n 2 examples/ddp_digits.py --epochs 5",
)
@click.option("-n", "--ranks", type=int, help="Ranks on this node [default: 1].")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the files of the run.")
@click.option("--record/--no-record", default=None, help="Record traces [default: yes].")
@click.option(
    "--bind/--no-bind", default=None, help="Bind each rank to its own cores [default: yes]."
)
@click.option(
    "--allocator",
    type=click.Choice(["keep", "system"]),
    help="What becomes of freed memory: it stays with the ranks, or as the C library does "
    "[default: keep].",
)
@click.option(
    "--machine",
    type=click.Path(path_type=Path),
    help="Machine file (from paceline probe) to store in the run's folder, for comparison with "
    "the plan.",
)
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Follow the plan file (from paceline plan --out), and compare the run with its estimate.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option("--dry-run", is_flag=True, help="Print what would run, and where; start nothing.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    out: Path | None,
    record: bool | None,
    bind: bool | None,
    allocator: str | None,
    machine: Path | None,
    plan_path: Path | None,
    as_json: bool,
    dry_run: bool,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS on several ranks and record where its time goes.

    The script needs no changes. Its ranks are started as torchrun starts them; inside a Slurm step
    or under mpirun each task becomes a rank. The run's folder holds its traces and result.json.
    """
    click.echo(
        f"paceline run: {script}" + (f" on {ranks} ranks" if ranks and ranks > 1 else ""), err=True
    )
    from paceline.core.clock import SystemClock
    from paceline.core.config import resolve
    from paceline.core.errors import PacelineError, ScriptFailed
    from paceline.core.plan_file import load_plan_file
    from paceline.launch.failures import first_traceback
    from paceline.launch.options import RunConfig
    from paceline.launch.run import claim_folder, execute, prepare, trace_warnings
    from paceline.probe.machine_file import known_machine
    from paceline.report.comparable import machine_difference

    clock = SystemClock()
    flags = {"ranks": ranks, "record": record, "bind": bind, "allocator": allocator}
    resolved = resolve(RunConfig, flags=flags)
    plan = load_plan_file(plan_path) if plan_path is not None else None
    job = prepare(script, args, resolved, out, clock, plan=plan)
    _warn(job.warnings)
    described = known_machine(machine)
    if plan is not None and plan.estimate is not None:
        difference = machine_difference(plan.estimate, described.digest(), described.name)
        if difference:
            _warn([f"the report will not compare this run with its plan: {difference}"])
    job = job if dry_run else claim_folder(job)
    click.echo(f"paceline run: world size {job.ranks}, writing {job.run_folder}", err=True)
    click.echo(f"paceline run: {job.allocator.note}", err=True)
    if dry_run:
        return
    try:
        with _stdout_as_stderr() if as_json else contextlib.nullcontext():
            result = execute(job, machine=described, clock=clock)
    except PacelineError as error:
        if isinstance(error, ScriptFailed) and (text := first_traceback(job.run_folder)):
            click.echo(text, err=True)
        _warn(trace_warnings(job.run_folder))
        raise
    _warn(trace_warnings(job.run_folder))
    if job.rank != 0:  # only rank 0's task knows how all ranks ended
        return
    from paceline.report.words import summary_line

    if as_json:
        click.echo(result.to_text(), nl=False)
    click.echo(summary_line(result, job.run_folder), err=True)
    if job.resolved.config.record:
        click.echo(
            f"next: paceline why {job.run_folder}, paceline report {job.run_folder}", err=True
        )


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Send the ranks' stdout to stderr: with --json, stdout holds one object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
