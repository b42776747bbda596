"""The figures of one run: throughput, phases, rates and scores, from its traces alone.

The throughput is that of the loop as it is, epochs' beginnings and waits for data included, without
the first steps and without evaluations. It is the median over blocks of steps: a mean would take in
every moment in which something else ran on the machine, and a median of single steps would leave
out what only every other step pays, as a batch that a loader's workers deliver in pairs.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.errors import CorruptData, UsageError
from paceline.core.files import read_text
from paceline.report.model import gather

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.report.model import Report
    from paceline.trace.analysis.phases import RankPhases

BLOCKS = 10
WARM_UP_SHARE = 0.1  # of the steps: caches fill, the allocator grows, loaders' workers start
LEAST_STEPS = 5


def measure_run(run: Path, *, units_per_step: float) -> dict[str, Any]:
    """Return the fields of a `CellRun` that a run's folder gives.

    Args:
        run: its folder.
        units_per_step: units of work that all ranks together do in a step, as samples.

    Raises:
        UsageError: it took too few steps to measure anything.
        PacelineError: as `gather`.
    """
    report = gather(run)
    steps = report.steps
    first = max(1, math.ceil(WARM_UP_SHARE * steps))
    if steps - first < LEAST_STEPS:
        raise UsageError(
            f"{steps} steps are too few to measure",
            where=str(run),
            why=f"after a warm-up of {first} steps at least {LEAST_STEPS} count",
            fix="Train more epochs or samples, or with smaller batches",
        )
    ranks = report.rank_phases
    seconds = np.mean([rank.train_s[first:steps] for rank in ranks], axis=0)
    slowest = np.max([rank.train_s[first:steps] for rank in ranks], axis=0)
    phases = np.mean([rank.seconds[first:steps].mean(axis=0) for rank in ranks], axis=0)
    return {
        "throughput": units_per_step / _typical_step_s(seconds),
        "steps": steps - first,
        "step_s": float(np.median(slowest)),
        "step_s_p95": float(np.quantile(slowest, 0.95)),
        "phases": {
            name: float(spent)
            for name, spent in zip(PHASES, phases, strict=True)
            if spent and name != "evaluation"
        },
        "busy_cores": _busy_cores(ranks, first, steps),
        "peak_memory_bytes": report.peak_memory_bytes,
        **_communication(report, steps),
        "is_planned": _is_planned(report),
    }


def _typical_step_s(seconds: np.ndarray) -> float:
    """Return the median over blocks of their mean step."""
    blocks = np.array_split(seconds, min(BLOCKS, len(seconds)))
    return float(np.median([block.mean() for block in blocks]))


def _busy_cores(ranks: tuple[RankPhases, ...], first: int, steps: int) -> float:
    """Return the cores that all ranks' threads used on average."""
    running_s = sum(float(rank.running_s[first:steps].sum()) for rank in ranks)
    wall_s = float(np.mean([rank.step_s[first:steps].sum() for rank in ranks]))
    return running_s / wall_s if wall_s > 0 else 0.0


def _communication(report: Report, steps: int) -> dict[str, float]:
    lines = [line for line in report.traffic if line.ranks > 1]
    rates = [line.bandwidth_bytes_per_s for line in lines if line.bandwidth_bytes_per_s]
    return {
        "reduced_bytes": sum(line.bytes for line in lines) / steps,
        "reduced_bytes_per_s": rates[0] if rates else 0.0,  # the costliest class comes first
    }


def _is_planned(report: Report) -> bool:
    comparison = report.comparison
    has_plan = comparison.predicted_step_s is not None and not comparison.not_compared
    return has_plan and comparison.undisturbed_steps > 0


def read_scores(path: Path) -> dict[str, float]:
    """Return the numbers of the JSON object that a script wrote; empty if it wrote no file.

    Raises:
        CorruptData: it is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise CorruptData(
            "the script's result is not JSON",
            where=str(path),
            why=str(problem),
            fix="Have it write one JSON object with numbers, as accuracy",
        ) from problem
    if not isinstance(data, dict):
        raise CorruptData(
            "the script's result is no JSON object",
            where=str(path),
            fix="Have it write one JSON object with numbers, as accuracy",
        )
    return {
        name: float(value)
        for name, value in data.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
