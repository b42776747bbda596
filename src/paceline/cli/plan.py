"""``paceline plan``: step time and memory of a model, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.perf import Estimate


@click.command(epilog="Example: paceline plan examples/digits_step.py:step -n 2")
@click.argument("target", metavar="FILE.py:FUNCTION")
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=1, help="Ranks [default: 1].")
@click.option("--machine", type=click.Path(path_type=Path), help="Machine [default: as probed].")
@click.option("--threads", type=click.IntRange(min=1), help="Threads per rank [default: share].")
@click.option("--out", type=click.Path(path_type=Path), help="File for the estimate, as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the estimate as JSON on stdout.")
def plan(
    target: str,
    ranks: int,
    machine: Path | None,
    threads: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Predict step time and memory of a model on this machine.

    FUNCTION takes no argument and returns a tuple or dict of module, inputs, target, loss_fn and
    optimizer (a function of the parameters). The model is captured on tensors without data: it is
    neither run nor changed.
    """
    from paceline.core.files import commit_text, prepare_file
    from paceline.launch.predict import predict

    if out is not None:
        prepare_file(out)
    estimate = predict(target, ranks=ranks, threads=threads, machine_path=machine)
    if out is not None:
        commit_text(out, estimate.to_text())
        click.echo(f"plan: wrote {out}", err=True)
    if as_json:
        click.echo(estimate.to_text(), nl=False)
    else:
        _show(estimate)


def _show(estimate: Estimate) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{estimate.workload}: {estimate.step_time_s * 1e3:.2f} ms per step "
        f"({estimate.low_s * 1e3:.2f} to {estimate.high_s * 1e3:.2f}) on {estimate.world_size} "
        f"rank(s) of {estimate.threads} thread(s), limited by {estimate.limit}",
        markup=False,
        soft_wrap=True,
    )
    phases = Table("phase", "ms", "of the step", "rests on", box=None)
    for name, seconds in estimate.breakdown.items():
        if seconds:
            share = f"{seconds / estimate.step_time_s:.0%}"
            phases.add_row(name, f"{seconds * 1e3:.3f}", share, estimate.sources.get(name, ""))
    console.print(phases)
    memory = Table("memory per rank", "MiB", box=None)
    for name, count in estimate.memory_bytes.items():
        if count:
            memory.add_row(name, f"{count / 2**20:.2f}")
    memory.add_row("together", f"{sum(estimate.memory_bytes.values()) / 2**20:.2f}")
    console.print(memory)
