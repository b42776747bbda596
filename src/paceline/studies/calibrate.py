"""Calibrates a Machine by a run: gathers the measurements here, `perf` fits the Machine to them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.errors import NotFound, UsageError
from paceline.perf.calibrate import (
    Calibration,
    Evidence,
    Observed,
    ObservedCollective,
    calibrate,
)
from paceline.report.comparable import difference
from paceline.report.compare import padded, undisturbed_steps
from paceline.report.model import gather
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.machine import Machine
    from paceline.report.model import Report
    from paceline.trace.analysis.communication import Traffic

# Neighbouring steps are alike, so that the spread of single steps says too little of how far a
# median may be off. The spread of the medians of blocks of steps does not.
BLOCKS = 10
LEAST_BLOCK_STEPS = 4


def calibrate_by_run(machine: Machine, run: Path) -> tuple[Machine, Calibration]:
    """Return a machine that predicts the run in folder `run` better, and the record of its changes.

    Args:
        machine: the prior; the machine that the run's plan was predicted from, or a better one.
        run: its folder, or the demo's.

    Raises:
        NotFound: there is no run, it recorded nothing, or it followed no plan with a Workload.
        UsageError: the run is not of its plan, or has no undisturbed step.
        CorruptTrace: a trace is damaged.
    """
    report = gather(run)
    planned = RunFolder(report.run).read_plan()
    if planned is None or planned.workload is None or planned.estimate is None:
        raise NotFound(
            "the run does not say what model it trained",
            where=str(report.run),
            why="it has no plan with a Workload",
            fix="Run it again with --plan and the file that `paceline plan --out` wrote",
        )
    differs = difference(
        planned.estimate,
        report.trace,
        report.traffic,
        steps=report.steps,
        config=report.config,
        machine={},
    )
    if differs:
        raise UsageError(
            "the run is not the one that was planned",
            where=str(report.run),
            why=differs,
            fix="Plan what the script trains, and run it with --plan",
        )
    return calibrate(machine, planned.workload, planned.plan, gather_evidence(report))


def gather_evidence(report: Report) -> Evidence:
    """Return the measurements of a run's undisturbed steps."""
    chosen = undisturbed_steps(report.rank_phases, report.stragglers)
    steps = np.flatnonzero(chosen)
    # Shape (ranks, steps, phases) of the undisturbed steps.
    seconds = np.stack([rank.seconds[padded(chosen, rank.steps)] for rank in report.rank_phases])
    slowest = np.max([rank.train_s[: len(chosen)] for rank in report.rank_phases], axis=0)[chosen]
    phases = {name: _observed(seconds[:, :, i]) for i, name in enumerate(PHASES)}
    collectives = tuple(
        ObservedCollective(
            operation=traffic.operation,
            ranks=traffic.ranks,
            bytes=traffic.typical_bytes,
            # The spread of single collectives is not kept: a step's is at least as large.
            duration=Observed(
                seconds=traffic.transfer_s,
                error_s=_relative(phases["transfer"]) * traffic.transfer_s,
            ),
        )
        for traffic in _costliest(report)
    )
    return Evidence(
        phases=phases,
        step=_observed(slowest[None, :]),
        collectives=collectives,
        steps=len(steps),
        source=str(report.run),
    )


def _costliest(report: Report) -> list[Traffic]:
    """Return the costliest class of collectives of each operation between all ranks."""
    found: dict[str, Traffic] = {}
    for traffic in report.traffic:
        if traffic.ranks == report.world_size and traffic.typical_bytes:
            found.setdefault(traffic.operation, traffic)
    return list(found.values())


def _observed(seconds: np.ndarray) -> Observed:
    """Return the median over steps, the mean over ranks, and its standard error.

    Args:
        seconds: shape (ranks, steps).
    """
    count = seconds.shape[1]
    if not count:
        return Observed(seconds=0.0, error_s=math.inf)
    typical_s = float(np.median(seconds, axis=1).mean())
    blocks = min(BLOCKS, count // LEAST_BLOCK_STEPS)
    if blocks < 2:
        return Observed(seconds=typical_s, error_s=math.inf)
    medians = [np.median(block, axis=1).mean() for block in np.array_split(seconds, blocks, axis=1)]
    return Observed(seconds=typical_s, error_s=float(np.std(medians, ddof=1) / math.sqrt(blocks)))


def _relative(observed: Observed) -> float:
    return observed.error_s / observed.seconds if observed.seconds > 0 else math.inf
