"""A simulated job: what each rank's steps took, and on what.

Checked against the closed forms of `perf.transformer` and against itself: by class and one by one
agree, see tests/property/test_simulator.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.plan import Plan
from paceline.perf.simulator.actors import Actors, all_ranks, rank_classes
from paceline.perf.simulator.disturbances import Disturbances
from paceline.perf.simulator.program import step_programs
from paceline.perf.simulator.replay import Happening, RankReplay

if TYPE_CHECKING:
    from paceline.core.machine import Machine
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.supply import SampleCost

ReplayChoice = Literal["class", "rank"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSimulation:
    """Steps of a job.

    Attributes:
        plan: how it is spread.
        actors: the ranks that were replayed, and for how many each stands.
        ends_s: when each step of each actor ended, from the begin of the first; shape (actors,
            steps).
        happenings: what each actor did, in order; empty unless it was recorded.
    """

    plan: Plan
    actors: Actors
    ends_s: np.ndarray
    happenings: list[list[Happening]]

    @property
    def step_s(self) -> np.ndarray:
        """Seconds of each step, from the last rank's end of one to that of the next; (steps,)."""
        ends_s = self.ends_s.max(axis=0)
        steps_s: np.ndarray = np.diff(ends_s, prepend=0.0)
        return steps_s

    @property
    def world_size(self) -> int:
        """Ranks of the job, those that others stand for included."""
        return self.plan.mesh.world_size


def simulate(  # noqa: PLR0913  # keywords, of which callers give few
    machine: Machine,
    model: Architecture,
    plan: Plan,
    batch: int,
    disturbances: Disturbances | None = None,
    *,
    sample: SampleCost | None = None,
    steps: int = 1,
    by: ReplayChoice = "class",
    records: bool = False,
) -> StepSimulation:
    """Replay steps of a plan.

    Args:
        machine: with peaks, memory bandwidth and links.
        model: to train.
        plan: how it is spread.
        batch: samples of a step over all replicas.
        disturbances: what goes wrong; None: nothing.
        sample: what it takes to load one; None: data are in memory.
        steps: how many.
        by: ``class``: one rank for all that do the same; ``rank``: all of them.
        records: keep what each rank did, for `write_run`.

    Raises:
        UsageError: the plan does not fit the model or the machine; a disturbed rank is none of the
            plan's; jitter is asked of classes, whose ranks would no longer do the same.
    Cost: about 2 us for each operation of a rank: a pass has two to five.
    """
    disturbances = disturbances or Disturbances()
    strangers = sorted(rank for rank in disturbances.ranks if not 0 <= rank < plan.mesh.world_size)
    if strangers:
        raise UsageError(
            f"rank {strangers[0]} is disturbed, and there are {plan.mesh.world_size}",
            where="simulate",
            fix=f"Give ranks from 0 to {plan.mesh.world_size - 1}",
        )
    if by == "class" and disturbances.jitter:
        raise UsageError(
            "jitter makes all ranks different",
            where="simulate(by='class')",
            fix="Simulate by rank, or without jitter",
        )
    if steps < 1:
        raise UsageError("there is no step to simulate", where="simulate", fix="Give 1 or more")
    programs = step_programs(machine, model, plan, batch, sample)
    actors = rank_classes(plan.mesh, disturbances) if by == "class" else all_ranks(plan.mesh)
    found = RankReplay(actors, programs, disturbances, steps, records).run()
    return StepSimulation(
        plan=plan, actors=actors, ends_s=found.ends_s, happenings=found.happenings
    )
