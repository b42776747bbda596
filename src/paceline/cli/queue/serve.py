"""``paceline queue serve``: the daemon of a queue."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from paceline.cli.queue.asking import dir_option, find_paths


@click.command(
    short_help="Run the jobs of this machine's queue.",
    epilog="""\b
Example: paceline queue serve --policy fifo
  four jobs at once on any machine:   paceline queue serve --slots 4
  GPUs:                               paceline queue serve --gpus --policy srtf
  then, elsewhere:                    paceline queue submit -- python train.py
""",
)
@dir_option
@click.option("--policy", default="fifo", show_default=True, help="What decides who runs.")
@click.option(
    "--slots",
    type=int,
    metavar="N",
    help="CPU slots: more than there are cores share cores [default: one for each allowed core].",
)
@click.option("--gpus", is_flag=True, help="Devices are NVIDIA GPUs, as nvidia-smi lists them.")
@click.option(
    "--rates",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="CSV file of measured rates by profile, or what paceline characterize wrote, for elastic "
    "jobs.",
)
@click.option(
    "--sharing",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON file of what jobs use of a device: then they may share it.",
)
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    metavar="TENANT=DEVICES",
    help="Most devices of a tenant at a time, under --policy paceline; may be given several times.",
)
@click.option(
    "--objective",
    default="",
    metavar="NAME",
    help="What a policy that can choose optimises: jct, makespan, fairness or utilisation.",
)
@click.option(
    "--round",
    "round_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Decide at multiples of this time only [default: whenever something happens].",
)
@click.option(
    "--check-devices",
    "check_s",
    type=click.FloatRange(min=0, min_open=True),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks whether all devices are there.",
)
@click.option(
    "--keep-events",
    type=click.IntRange(min=5),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Of the log, for replay.",
)
@click.option(
    "--keep-jobs",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    metavar="N",
    help="That have ended; those before go to the file ended.jsonl.",
)
@click.option("--once", is_flag=True, help="End when all jobs have ended; 1 if one failed.")
def serve(
    folder: Path | None,
    policy: str,
    slots: int | None,
    gpus: bool,
    rates: Path | None,
    sharing: Path | None,
    quotas: tuple[str, ...],
    objective: str,
    round_s: float,
    check_s: float,
    keep_events: int,
    keep_jobs: int,
    once: bool,
) -> None:
    """Run the jobs of this machine's queue, until Ctrl-C or SIGTERM.

    Jobs go on when this ends, however it ends: the next `serve` finds them. It needs no root, and
    listens on a socket that only its user may use.
    """
    from paceline.core.clock import SystemClock
    from paceline.core.config import environment
    from paceline.core.errors import UsageError
    from paceline.scheduler.local.daemon import Daemon, Retention
    from paceline.scheduler.local.jobs.devices import cpu_devices, gpu_devices
    from paceline.scheduler.local.jobs.rates import read_measured
    from paceline.scheduler.local.queue.setup import PolicyOptions, Setup

    if gpus and slots is not None:
        raise UsageError("--gpus and --slots exclude each other", fix="Give one of them")
    devices = gpu_devices(environment().get("CUDA_VISIBLE_DEVICES")) if gpus else cpu_devices(slots)
    options = PolicyOptions(objective=objective, round_s=round_s, quotas=_quotas(quotas))
    setup = Setup(policy, devices, read_measured(rates, sharing), options)
    daemon = Daemon(
        find_paths(folder),
        setup,
        SystemClock(),
        _say,
        check_s=check_s,
        retention=Retention(keep_events, keep_jobs),
    )
    try:
        well = daemon.run(once=once)
    finally:
        daemon.close()
    if not well:
        sys.exit(1)


def _quotas(texts: tuple[str, ...]) -> dict[str, int]:
    quotas: dict[str, int] = {}
    for text in texts:
        tenant, equals, devices = text.rpartition("=")
        if not equals or not devices.isdecimal():
            raise click.BadParameter(f"'{text}' is not TENANT=DEVICES", param_hint="--quota")
        quotas[tenant] = int(devices)
    return quotas


def _say(line: str) -> None:
    click.echo(f"queue: {line}", err=True)
