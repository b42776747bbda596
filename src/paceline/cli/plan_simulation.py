"""``paceline plan --model --simulate``: steps of a plan replayed rank by rank, as traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.perf.transformer import Architecture, SampleCost

MOST_RANKS = 4096  # each has a file


class RankFactor(click.ParamType[tuple[int, float]]):
    """``RANK:FACTOR``: a rank that computes slower."""

    name = "RANK:FACTOR"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return the rank and the times that its compute takes.

        >>> RankFactor().convert("3:1.5", None, None)
        (3, 1.5)
        """
        rank, _, factor = str(value).partition(":")
        try:
            found = int(rank), float(factor)
        except ValueError:
            found = -1, 0.0
        if found[0] < 0 or not 0 < found[1] < float("inf"):
            self.fail(f"'{value}' is no rank with a factor above 0, as 3:1.5", param, ctx)
        return found


def write_simulation(
    machine: Machine,
    model: Architecture,
    plan: Plan,
    batch: int,
    folder: Path,
    *,
    sample: SampleCost,
    steps: int,
    slow: tuple[tuple[int, float], ...],
    jitter: float,
) -> None:
    """Simulate steps of a plan and write them as the traces of a run.

    Args:
        machine: to run on.
        model: to train.
        plan: to simulate.
        batch: samples of a step.
        folder: of the run.
        sample: what it takes to load one.
        steps: how many.
        slow: ranks that compute slower, each with its factor.
        jitter: standard deviation of each pass over its mean.

    Raises:
        UsageError: there are too many ranks, or a slow one is none of the plan's.
        StorageError: a trace cannot be written.
    """
    from paceline.core.errors import UsageError
    from paceline.perf.simulator import Disturbances, SlowRank, simulate, write_run

    ranks = plan.mesh.world_size
    if ranks > MOST_RANKS:
        raise UsageError(
            f"a simulation of {ranks} ranks would write as many files",
            where="paceline plan --simulate",
            fix=f"Simulate up to {MOST_RANKS} ranks, or by class with paceline.perf.simulator",
        )
    disturbances = Disturbances(
        slow=tuple(SlowRank(rank=rank, factor=factor) for rank, factor in slow), jitter=jitter
    )
    found = simulate(
        machine,
        model,
        plan,
        batch,
        disturbances,
        sample=sample,
        steps=steps,
        by="rank",
        records=True,
    )
    write_run(found, folder)
    median = sorted(found.step_s)[steps // 2]
    click.echo(
        f"plan: wrote {folder}: {steps} steps of {ranks} ranks, median {median:.4g} s; "
        f"read it with: paceline why {folder}",
        err=True,
    )
