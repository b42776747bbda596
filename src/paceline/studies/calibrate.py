"""Calibrates a Machine by runs: gathers the measurements here, `perf` fits the Machine to them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.errors import NotFound, UsageError
from paceline.perf.calibrate import (
    DRIFT_LOG_SD,
    Calibration,
    Evidence,
    Observed,
    ObservedCollective,
    calibrate,
)
from paceline.perf.transformer import TimedStep, fit_efficiency, with_efficiency
from paceline.perf.transformer.fitting import MODEL_ERROR
from paceline.report.comparable import difference
from paceline.report.compare import padded, undisturbed_steps
from paceline.report.model import gather
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.core.plan_file import PlanFile
    from paceline.perf.transformer import Architecture
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
    report, planned, _ = _planned_run(run)
    if planned.workload is None:
        raise _no_model(report)
    return calibrate(machine, planned.workload, planned.plan, gather_evidence(report))


def refit_by_runs(machine: Machine, model: Architecture, runs: Sequence[Path]) -> Machine:
    """Return the machine with an efficiency fitted to the steps of runs of one architecture.

    What a step waited for its data is left out, since the loaders are not the device's. A run of
    few steps, or of unequal ones, counts less.

    Args:
        machine: the prior; it is not changed.
        model: that the runs trained, after plans of ``paceline plan --model``.
        runs: their folders.

    Raises:
        NotFound: there is no run, it recorded nothing, or it followed no plan with an estimate.
        UsageError: a run is not of its plan, trained another model, or has no undisturbed step.
        CorruptTrace: a trace is damaged.
    """
    steps = [_timed_step(model, run) for run in runs]
    return with_efficiency(machine, fit_efficiency(machine, steps))


def _timed_step(model: Architecture, run: Path) -> TimedStep:
    report, planned, predicted = _planned_run(run)
    if predicted.workload_digest != model.digest():
        raise UsageError(
            "the run trained another architecture",
            where=str(report.run),
            why=f"its plan is of {predicted.workload}, with other numbers",
            fix="Give the --model that the run was planned with",
        )
    evidence = gather_evidence(report)
    seconds = evidence.step.seconds - evidence.phases["input"].seconds
    if not math.isfinite(evidence.step.error_s) or seconds <= 0:
        raise UsageError(
            f"{evidence.steps} steps in which no rank was late are too few to fit to",
            where=str(report.run),
            why=f"it takes {2 * LEAST_BLOCK_STEPS} to know how equal they are",
            fix="Fit to a longer run, or one without a straggler",
        )
    error = math.hypot(evidence.step.error_s / seconds, DRIFT_LOG_SD)
    return TimedStep(
        model=model,
        plan=planned.plan,
        batch=predicted.batch,
        step_s=seconds,
        weight=MODEL_ERROR / math.hypot(MODEL_ERROR, error),
    )


def _planned_run(run: Path) -> tuple[Report, PlanFile, Estimate]:
    """Return a run, its plan and the prediction, which are of one another."""
    report = gather(run)
    planned = RunFolder(report.run).read_plan()
    if planned is None or planned.estimate is None:
        raise _no_model(report)
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
    return report, planned, planned.estimate


def _no_model(report: Report) -> NotFound:
    return NotFound(
        "the run does not say what model it trained",
        where=str(report.run),
        why="it has no plan with a Workload, or with an estimate of --model",
        fix="Run it again with --plan and the file that `paceline plan --out` wrote",
    )


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
