"""The profile of a sweep: its log as scaling curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.breakdown import PHASES
from paceline.core.scaling_profile import (
    FailedCell,
    RankPoint,
    RepeatedFigure,
    ScalingCurve,
    ScalingProfile,
)
from paceline.studies.characterize.axes import BATCH
from paceline.studies.characterize.figures import PooledSpread, plain, pool, repeated
from paceline.studies.characterize.log import RUNS_NAME

if TYPE_CHECKING:
    from paceline.studies.characterize.axes import Cell
    from paceline.studies.characterize.log import CellRun, SweepLog

# What a step's time goes to, by phases.
_LIMITS = {
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("transfer",),
    "waiting for other ranks": ("waiting",),
    "data loading": ("input", "copy"),
    "the script's own work": ("host", "checkpoint", "other"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFacts:
    """What a profile says of its sweep besides the runs' figures.

    Attributes:
        program: that was run.
        machine: name of it.
        device: what a rank computes on.
        device_type: for the scheduler.
        axes: of the sweep.
        epochs: of each run.
        repeats: that were asked for.
        samples: of an epoch; 0 if not known.
        sample_bytes: of a stored sample; 0 if not known.
    """

    program: str
    machine: str
    device: str
    device_type: str
    axes: Mapping[str, Sequence[str]]
    epochs: int
    repeats: int
    samples: int = 0
    sample_bytes: float = 0.0


def make_profile(facts: SweepFacts, cells: Sequence[Cell], log: SweepLog) -> ScalingProfile:
    """Return the profile of the runs that a log has of the cells.

    Args:
        facts: of the sweep.
        cells: of the sweep, the baseline's first.
        log: with the runs.
    """
    runs = {cell.key: log.ended(cell) for cell in cells}
    pooled = pool([run.throughput for run in ended] for ended in runs.values())
    curves = []
    for name in dict.fromkeys(cell.name for cell in cells):
        own = [cell for cell in cells if cell.name == name and runs[cell.key]]
        if own:
            points = [_point(facts, cell, runs[cell.key], pooled) for cell in own]
            curves.append(
                ScalingCurve(
                    name=name, settings=dict(own[0].settings), points=with_efficiency(points)
                )
            )
    foreign = [run.foreign_cores for run in log.runs if run.foreign_cores is not None]
    return ScalingProfile(
        program=facts.program,
        machine=facts.machine,
        device=facts.device,
        device_type=facts.device_type,
        unit="samples" if BATCH in facts.axes else "batches",
        samples=facts.samples,
        epochs=facts.epochs,
        axes={axis: tuple(values) for axis, values in facts.axes.items()},
        curves=tuple(curves),
        failed=tuple(
            FailedCell(name=cell.name, ranks=cell.ranks, why=why)
            for cell in cells
            if (why := log.failure(cell))
        ),
        left_out=tuple(_left_out(cells, runs, log, facts.repeats)),
        repeats=facts.repeats,
        elapsed_s=math.fsum(run.elapsed_s for ended in runs.values() for run in ended),
        foreign_cores=statistics.fmean(foreign) if foreign else None,
    )


def _left_out(
    cells: Sequence[Cell], runs: Mapping[str, Sequence[CellRun]], log: SweepLog, repeats: int
) -> list[str]:
    """Return the cells that have fewer repeats than asked for, in words."""
    found = []
    for cell in cells:
        missing = repeats - len(runs[cell.key])
        if missing > 0 and not log.failure(cell):
            found.append(f"{cell.words}: {missing} of {repeats} repeats")
    return found


def with_efficiency(points: Sequence[RankPoint]) -> tuple[RankPoint, ...]:
    """Return the points of a curve with their efficiency against that of the fewest ranks."""
    ordered = sorted(points, key=lambda point: point.ranks)
    first = ordered[0].throughput.value / ordered[0].ranks
    return tuple(
        replace(point, efficiency=point.throughput.value / point.ranks / first) for point in ordered
    )


def limit_of(phases: Mapping[str, float]) -> str:
    """Return what most of a step goes to, in words; empty without a step.

    >>> limit_of({"forward": 1.0, "backward": 2.0, "transfer": 2.5})
    'compute'
    """
    totals = {
        words: sum(phases.get(name, 0.0) for name in names) for words, names in _LIMITS.items()
    }
    return max(totals, key=lambda words: totals[words]) if any(totals.values()) else ""


def _point(
    facts: SweepFacts, cell: Cell, runs: Sequence[CellRun], pooled: PooledSpread
) -> RankPoint:
    phases = {
        name: statistics.fmean([run.phases.get(name, 0.0) for run in runs])
        for name in PHASES
        if any(run.phases.get(name) for run in runs)
    }
    throughput = repeated([run.throughput for run in runs], pooled)
    planned = sorted((run for run in runs if run.is_planned), key=lambda run: run.throughput)
    middle = planned[(len(planned) - 1) // 2] if planned else None
    return RankPoint(
        ranks=cell.ranks,
        throughput=throughput,
        efficiency=1.0,
        step_s=statistics.median([run.step_s for run in runs]),
        step_s_p95=statistics.median([run.step_s_p95 for run in runs]),
        phases=phases,
        limit=limit_of(phases),
        busy_cores=statistics.fmean([run.busy_cores for run in runs]),
        peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
        reduced_bytes=statistics.fmean([run.reduced_bytes for run in runs]),
        reduced_bytes_per_s=statistics.median([run.reduced_bytes_per_s for run in runs]),
        input_bytes_per_s=facts.sample_bytes * throughput.value if BATCH in facts.axes else 0.0,
        scores=_scores(runs),
        run=f"{RUNS_NAME}/{middle.run}" if middle else "",
    )


def _scores(runs: Sequence[CellRun]) -> dict[str, RepeatedFigure]:
    names = dict.fromkeys(name for run in runs for name in run.scores)
    return {name: plain([run.scores[name] for run in runs if name in run.scores]) for name in names}
