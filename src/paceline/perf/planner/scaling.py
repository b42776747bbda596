"""How far a model scales: the best plan at each number of nodes, its throughput, and the knee.

Efficiency is the throughput of a node over that of a node at the smallest size that fits. The knee
is the size at which throughput x efficiency is largest: beyond it a node more costs a larger share
of efficiency than it adds to throughput.

Source: D. Eager, J. Zahorjan, E. Lazowska, Speedup versus efficiency in parallel systems, IEEE
Transactions on Computers 38 (1989), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.errors import MemoryExceeded
from paceline.core.plan import Plan
from paceline.core.record import Record
from paceline.perf.planner.search import BUDGET_S, search_plans

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.machine import Machine
    from paceline.perf.planner.space import SearchSpace
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.prediction import Risks


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint(Record):
    """The best plan at one size.

    Attributes:
        nodes: of the job.
        devices: of the job.
        plan: the fastest one that fits.
        step_s: seconds of a step.
        low_s: lower end of its 90 % interval.
        high_s: upper end.
        samples_per_s: of the job.
        efficiency: throughput of a node over that of a node at the smallest size that fits.
        node_hours: of a million samples.
        limit: what the step is limited by.
    """

    nodes: int
    devices: int
    plan: Plan
    step_s: float
    low_s: float
    high_s: float
    samples_per_s: float
    efficiency: float
    node_hours: float
    limit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingStudy(Record):
    """Throughput, efficiency and cost over nodes.

    Attributes:
        workload: name of the model.
        machine: its name.
        batch: samples of a step, at every size.
        points: by size; sizes at which nothing fits are left out.
        too_small: numbers of nodes at which no plan fits.
        indivisible: numbers of nodes over which the batch cannot be divided.
        knee: nodes at which throughput x efficiency is largest.
        samples: of the whole training; 0: not asked for.
    """

    workload: str
    machine: str
    batch: int
    points: tuple[ScalingPoint, ...]
    too_small: tuple[int, ...] = ()
    indivisible: tuple[int, ...] = ()
    knee: int
    samples: int = 0

    def training_s(self, point: ScalingPoint) -> float:
        """Return the seconds of the whole training at one size."""
        return self.samples / point.samples_per_s


def scaling_study(
    machine: Machine,
    model: Architecture,
    space: SearchSpace,
    risks: Risks | None = None,
    *,
    samples: int = 0,
    budget_s: float = BUDGET_S,
    on_progress: Callable[[int], None] | None = None,
) -> ScalingStudy:
    """Return the best plan at each of a space's numbers of nodes; the batch stays (strong scaling).

    Args:
        machine: with peaks, memory bandwidth and links.
        model: to train.
        space: the plans to compare.
        risks: stragglers and failures; the useful share of the time counts in the throughput.
        samples: of the whole training.
        budget_s: of all searches together.
        on_progress: called with the nodes that are searched next.

    Raises:
        MemoryExceeded: no plan fits at any size.
        UsageError: the batch cannot be divided at any size, or the machine lacks a figure.
    """
    points: list[ScalingPoint] = []
    too_small, indivisible = [], []
    for nodes in space.nodes:
        if on_progress is not None:
            on_progress(nodes)
        here = replace(space, nodes=(nodes,))
        if len(space.nodes) > 1 and next(here.options(machine, model), None) is None:
            indivisible.append(nodes)
            continue
        share_s = budget_s / len(space.nodes)
        found = search_plans(machine, model, here, risks, budget_s=share_s, explains=False)
        if not found.fits:
            too_small.append(nodes)
            continue
        best = found.best
        fit = best.memory_fit
        step_s = fit.step_s if fit else best.step_time_s
        spread = step_s / best.step_time_s
        rate = space.batch / step_s * best.useful_share
        first = points[0] if points else None
        base = first.samples_per_s / first.nodes if first else rate / nodes
        points.append(
            ScalingPoint(
                nodes=nodes,
                devices=nodes * machine.devices[0].count,
                plan=best.plan,
                step_s=step_s,
                low_s=best.low_s * spread,
                high_s=best.high_s * spread,
                samples_per_s=rate,
                efficiency=rate / nodes / base,
                node_hours=nodes * 1e6 / rate / 3600,
                limit=best.limit,
            )
        )
    if not points:
        raise MemoryExceeded(
            f"{model.name} fits at none of these sizes",
            where=f"{machine.name}, {', '.join(map(str, space.nodes))} nodes",
            why=f"a batch of {space.batch} does not divide, or a rank needs more than a device has",
            fix="Search with more nodes, or without --scaling to see what would fit",
        )
    knee = max(points, key=lambda point: point.samples_per_s * point.efficiency)
    return ScalingStudy(
        workload=model.name,
        machine=machine.name,
        batch=space.batch,
        points=tuple(points),
        too_small=tuple(too_small),
        indivisible=tuple(indivisible),
        knee=knee.nodes,
        samples=samples,
    )
