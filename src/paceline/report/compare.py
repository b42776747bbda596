"""Compares prediction and measurement, phase by phase.

The prediction is of an undisturbed step. So the measurement takes the steps after the warm-up that
are in no straggler's step range and of which no rank dropped events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES, Breakdown
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.blame import Straggler
    from paceline.trace.analysis.phases import RankPhases

WARM_UP_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseComparison(Record):
    """Seconds of one phase of a step; None where there was no prediction."""

    name: str
    predicted_s: float | None
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None where nothing was predicted or measured."""
        if not self.predicted_s or self.measured_s <= 0:
            return None
        return self.predicted_s / self.measured_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Record):
    """A typical undisturbed step, as predicted and as measured.

    Attributes:
        phases: in the order of a step; each is the median over steps, then the mean over ranks.
        predicted_step_s: None without a prediction.
        measured_step_s: the median over steps of the slowest rank's step time.
        undisturbed_steps: number of steps in these medians.
        steps: number of steps that all ranks completed.
        unfit: why a prediction is not compared; empty if it is compared, or there is none.
    """

    phases: tuple[PhaseComparison, ...]
    predicted_step_s: float | None
    measured_step_s: float
    undisturbed_steps: int
    steps: int
    unfit: str = ""

    @property
    def step_time_error(self) -> float | None:
        """|predicted / measured - 1| of the step time; None when there is no such number."""
        if self.predicted_step_s is None or self.measured_step_s <= 0:
            return None
        return abs(self.predicted_step_s / self.measured_step_s - 1)


def compare(
    rank_phases: Sequence[RankPhases],
    stragglers: Sequence[Straggler],
    predicted: Breakdown | None = None,
    predicted_step_s: float | None = None,
    *,
    unfit: str = "",
) -> Comparison:
    """Return a run's undisturbed step beside its prediction.

    Args:
        rank_phases: of an `Analysis`.
        stragglers: of an `Analysis`; their step ranges are left out.
        predicted: one step's seconds by phase.
        predicted_step_s: in place of the sum of `predicted`.
        unfit: why the prediction does not belong to this run; empty if it does.
    """
    chosen = undisturbed_steps(rank_phases, stragglers)
    steps = len(chosen)
    measured = Breakdown()
    step_s = 0.0
    if chosen.any():
        for rank in rank_phases:
            measured += rank.median_breakdown(padded(chosen, rank.steps))
        measured = measured.scaled(1 / len(rank_phases))
        slowest = np.max([rank.train_s[:steps] for rank in rank_phases], axis=0)
        step_s = float(np.median(slowest[chosen]))
    if unfit:
        predicted = predicted_step_s = None
    if predicted is not None and predicted_step_s is None:
        predicted_step_s = predicted.total_s
    return Comparison(
        phases=tuple(
            PhaseComparison(
                name=name,
                predicted_s=None if predicted is None else getattr(predicted, name),
                measured_s=getattr(measured, name),
            )
            for name in PHASES
        ),
        predicted_step_s=predicted_step_s,
        measured_step_s=step_s,
        undisturbed_steps=int(chosen.sum()),
        steps=steps,
        unfit=unfit,
    )


def undisturbed(steps: int, stragglers: Sequence[Straggler]) -> np.ndarray:
    """Return a mask over `steps`: after the warm-up and outside every straggler's step range.

    The warm-up is 10 steps, but at most a third of the steps.
    """
    chosen = np.ones(steps, dtype=bool)
    chosen[: min(WARM_UP_STEPS, steps // 3)] = False
    for late in stragglers:
        chosen[late.first_step : late.last_step + 1] = False
    return chosen


def undisturbed_steps(
    rank_phases: Sequence[RankPhases], stragglers: Sequence[Straggler]
) -> np.ndarray:
    """Return a mask over the steps that all ranks completed: undisturbed, and recorded by all."""
    steps = min((rank.steps for rank in rank_phases), default=0)
    chosen = undisturbed(steps, stragglers)
    for rank in rank_phases:
        chosen &= rank.recorded[:steps]
    return chosen


def padded(chosen: np.ndarray, steps: int) -> np.ndarray:
    """Return the mask for a rank that completed more steps than others."""
    return np.concatenate([chosen, np.zeros(steps - len(chosen), dtype=bool)])
