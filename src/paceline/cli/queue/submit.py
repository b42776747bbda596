"""``paceline queue submit``: puts a command into the queue."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import click

from paceline.cli.queue.asking import (
    ask_daemon,
    describe,
    dir_option,
    find_paths,
    json_option,
    print_json,
)


@click.command(
    short_help="Put a command into the queue.",
    context_settings={"allow_interspersed_args": False},  # what follows COMMAND is the command's
    epilog="""\b
Example: paceline queue submit -n 2 --work 5000 -- python train.py --epochs 5
  ranks of a script:   paceline queue submit -n 2 --ranks -- train.py --epochs 5
  and wait for it:     paceline queue submit --wait -- make test
  an example of a job that is preempted and goes on: examples/queue_job.py
""",
)
@dir_option
@click.option("-n", "--devices", type=int, default=1, show_default=True, help="Devices it needs.")
@click.option("--min-devices", type=int, default=0, help="Fewest that will do [default: -n].")
@click.option("--max-devices", type=int, default=0, help="Most it can use [default: -n].")
@click.option("--name", default="", help="Of the job, unique [default: the program, a number].")
@click.option("--profile", default="", help="Class of jobs that run alike, for measured rates.")
@click.option(
    "--rates",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE|RUN",
    help="Measured rates of its profile: a CSV file, what paceline characterize wrote, or the "
    "folder of a run, in steps; may be given several times.",
)
@click.option(
    "--device-type", "device_types", multiple=True, metavar="TYPE", help="May be given again."
)
@click.option(
    "--mesh",
    callback=lambda _context, _option, text: _mesh(text),
    default="",
    metavar="AxB",
    help="Axes of its ranks, that with the most traffic last, to place them by.",
)
@click.option("--work", type=float, help="Units of work, for example steps [default: not known].")
@click.option(
    "--deadline", type=float, metavar="SECONDS", help="From now, by which it should have ended."
)
@click.option("--memory", "memory_gib", type=float, metavar="GIB", help="On each device.")
@click.option("--tenant", default="", help="Who pays.")
@click.option(
    "--weight",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="2 counts as two jobs in a mean.",
)
@click.option(
    "--restart-cost",
    "restart_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Without progress whenever it starts from a checkpoint: it is moved only where that pays.",
)
@click.option(
    "--start-cost",
    "start_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Without progress when it starts for the first time.",
)
@click.option("--no-preempt", is_flag=True, help="Never stop it for another job.")
@click.option("--no-share", is_flag=True, help="Never let it share devices with other jobs.")
@click.option("--ranks", is_flag=True, help="COMMAND is a script for paceline run, with -n ranks.")
@click.option(
    "--signal",
    "stop_signal",
    default="SIGUSR1",
    show_default=True,
    help="On which it saves its state and ends with exit code 75.",
)
@click.option(
    "--grace",
    "grace_s",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="From that signal to SIGKILL.",
)
@click.option(
    "--log-limit",
    "log_limit",
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Of each start's log, the begin and the end are kept, so much in all; 0: all of it.",
)
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="Beside all of this shell's."
)
@click.option(
    "--cwd", type=click.Path(path_type=Path), default=Path(), help="[default: this folder]"
)
@click.option("--wait", is_flag=True, help="Until it has ended; then end as it did.")
@click.option(
    "--wait-for-daemon",
    "absent_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="For scripts: how long to wait for a daemon that is being started or was killed.",
)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    folder: Path | None,
    devices: int,
    min_devices: int,
    max_devices: int,
    name: str,
    profile: str,
    rates: tuple[Path, ...],
    device_types: tuple[str, ...],
    mesh: tuple[int, ...],
    work: float | None,
    deadline: float | None,
    memory_gib: float | None,
    tenant: str,
    weight: float,
    restart_s: float,
    start_s: float,
    no_preempt: bool,
    no_share: bool,
    ranks: bool,
    stop_signal: str,
    grace_s: float,
    log_limit: str,
    variables: tuple[str, ...],
    cwd: Path,
    wait: bool,
    absent_s: float,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Put COMMAND into the queue, with all variables of this shell; print the job's name.

    A job that can never run here is refused, with the reason. When the queue needs its devices, a
    job gets a signal, saves its state and ends with exit code 75; it is started again later
    (docs/guides/queue-local.md).
    """
    from paceline.core.clock import SystemClock
    from paceline.core.config import environment, parse_size
    from paceline.scheduler.job import Job
    from paceline.scheduler.local.jobs.rates import read_given
    from paceline.scheduler.local.jobs.submission import Submission
    from paceline.scheduler.local.protocol.client import wait_for_end
    from paceline.scheduler.local.protocol.messages import Request

    profile, given = read_given(rates, profile)
    job = Job(
        name=name,
        devices=devices,
        min_devices=min_devices,
        max_devices=max_devices,
        device_types=device_types,
        profile=profile,
        mesh=mesh,
        work=work,
        deadline_s=deadline,
        memory_bytes=int((memory_gib or 0) * 2**30),
        tenant=tenant,
        weight=weight,
        restart_s=restart_s,
        start_s=start_s,
        preemptible=not no_preempt,
        shares=not no_share,
    )
    submission = Submission(
        job=job,
        command=command,
        folder=str(cwd.absolute()),
        environ={**environment(), **_variables(variables)},
        launcher=sys.executable if ranks else "",
        stop_signal=stop_signal,
        grace_s=grace_s,
        log_bytes=parse_size(log_limit, where="--log-limit"),
        rates=given,
        token=uuid.uuid4().hex,
    )
    request = Request(verb="submit", submission=submission)
    reply = ask_daemon(folder, request, absent_s=absent_s)
    view = reply.jobs[0]
    if not wait:
        print_json(view) if as_json else click.echo(view.name)
        return
    click.echo(f"queue: waiting for {view.name}", err=True)
    view = wait_for_end(find_paths(folder), view.name, SystemClock()).jobs[0]
    if as_json:
        print_json(view)
    else:
        click.echo(f"{view.name}: {view.status}")
        for line in describe(view):
            click.echo(f"  {line}", err=True)
    if view.exit_code != 0:
        code = view.exit_code
        sys.exit(1 if code is None else 128 - code if code < 0 else code)


def _mesh(text: str) -> tuple[int, ...]:
    sizes = text.split("x") if text else []
    if not all(size.isdecimal() for size in sizes):
        raise click.BadParameter(f"'{text}' is not AxB, such as 2x4")
    return tuple(int(size) for size in sizes)


def _variables(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for text, (name, equals, _) in zip(texts, pairs, strict=True):
        if not name or not equals:
            raise click.BadParameter(f"'{text}' is not NAME=VALUE", param_hint="--env")
    return {name: value for name, _, value in pairs}
