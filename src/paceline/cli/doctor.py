"""``paceline doctor``: checks whether this machine is fit for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.probe.doctor import Finding


@click.command(epilog="Example: paceline doctor")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder with the training data [default: current directory].",
)
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), default=1, help="Ranks that share this node."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.pass_context
def doctor(context: click.Context, folder: Path, ranks: int, as_json: bool) -> None:
    """Check whether this machine is fit for training, and say what to fix.

    Checks cores and what they would be for, memory and its bandwidth, /dev/shm, the file system,
    torch, MPI, Slurm, GPUs and the clock.
    Exits with status 1 only if training cannot work on this machine.
    """
    from paceline.probe.doctor import diagnose

    findings = [*diagnose(folder), *_cores_of_ranks(ranks)]
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


def _cores_of_ranks(ranks: int) -> Iterator[Finding]:
    """Yield what the cores of this node would be for in a run, and what bounds its ranks beside."""
    from paceline.core.config import environment
    from paceline.launch.budget import NodeCores, budget_words, memory_contention, node_budget
    from paceline.launch.budget.bandwidth import NOTABLE
    from paceline.probe.doctor import Finding
    from paceline.probe.machine_file import known_machine

    budget = node_budget("auto", NodeCores.read(), ranks=ranks, environ=environment())
    why = f"{budget.why}; " if budget.why and budget.state == "bound" else ""
    yield Finding(
        topic="budget",
        status="warn" if budget.fix or budget.state == "unbound" else "ok",
        what=why + budget_words(budget),
        fix=budget.fix,
    )
    if (found := memory_contention(known_machine(None))) is not None:
        slow = found.share < NOTABLE
        yield Finding(
            topic="bandwidth",
            status="ok",
            what=found.words,
            fix="More ranks per node gain little where steps are bound by memory" if slow else "",
        )
