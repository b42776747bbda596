"""Compares prediction and measurement, phase by phase.

The prediction is of an undisturbed step. So the measurement takes the steps after the warm-up in
which no rank was late (see `undisturbed`) and of which no rank dropped events, and the typical ones
of them: the half whose time is closest to the median. Medians of phases would not add up to the
median step; shares of typical steps do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.core.breakdown import PHASES, Breakdown
from paceline.core.record import Record
from paceline.report.units import seconds_that_add_up, shown_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.blame import Straggler
    from paceline.trace.analysis.phases import RankPhases

WARM_UP_STEPS = 10
_NONE_RECORDED = "no step after the warm-up was recorded by all ranks"
_FEW = 1 / 3  # of the steps of a range: what happens there does not move its median far


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
        phases: in the order of a step; evaluation is measured as 0. Each is its share of the
            `typical_steps`, the mean over ranks, times `measured_step_s`: they add up to it.
        predicted_step_s: None without a prediction.
        measured_step_s: the median over steps of the slowest rank's step time.
        undisturbed_steps: number of steps over which `measured_step_s` is the median; 0 if in
            each step a rank was late, and it is the median over all steps after the warm-up.
        steps: number of steps that all ranks completed.
        not_compared: reason that the prediction is not shown beside the measurement; else empty.
    """

    version: ClassVar[int] = 2
    phases: tuple[PhaseComparison, ...]
    predicted_step_s: float | None
    measured_step_s: float
    undisturbed_steps: int
    steps: int
    not_compared: str = ""

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 called `not_compared` unfit."""
        if "unfit" in data:
            data["not_compared"] = data.pop("unfit")
        return data

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
    not_compared: str = "",
) -> Comparison:
    """Return a run's undisturbed step beside its prediction; of late steps if there is no other.

    Args:
        rank_phases: of an `Analysis`.
        stragglers: of an `Analysis`; the steps in which they were late are left out, see
            `undisturbed`.
        predicted: one step's seconds by phase.
        predicted_step_s: in place of the sum of `predicted`.
        not_compared: why the prediction does not belong to this run; empty if it does.
    """
    chosen = undisturbed_steps(rank_phases, stragglers)
    steps, undisturbed_count = len(chosen), int(chosen.sum())
    if not undisturbed_count:  # late steps tell more than none
        chosen = undisturbed_steps(rank_phases, ())
    measured = Breakdown()
    step_s = 0.0
    if chosen.any():
        slowest = np.max([rank.train_s[:steps] for rank in rank_phases], axis=0)
        step_s = float(np.median(slowest[chosen]))
        typical = typical_steps(slowest, chosen)
        sums = np.sum([rank.seconds[:steps][typical].sum(axis=0) for rank in rank_phases], axis=0)
        sums[PHASES.index("evaluation")] = 0.0  # it is not part of these step times
        shares = sums / max(float(sums.sum()), 1e-12)
        measured = Breakdown(**dict(zip(PHASES, (shares * step_s).tolist(), strict=True)))
    elif steps and (predicted is not None or predicted_step_s is not None):
        not_compared = not_compared or _NONE_RECORDED
    if not_compared:
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
        undisturbed_steps=undisturbed_count,
        steps=steps,
        not_compared=not_compared,
    )


def shown_phases(comparison: Comparison) -> list[PhaseComparison]:
    """Return the phases that get a row: predicted, or large enough not to be shown as 0 %."""
    measured = {phase.name: phase.measured_s for phase in comparison.phases}
    shown = shown_parts(tuple(measured), [measured])
    return [phase for phase in comparison.phases if phase.name in shown or phase.predicted_s]


def shown_cells(comparison: Comparison) -> list[list[str]]:
    """Return predicted seconds, measured seconds and ratio, as text, of each of `shown_phases`.

    A last row has the seconds of the step, to which the others add up; its ratio is left out.
    """
    phases = shown_phases(comparison)
    *predicted, predicted_step = seconds_that_add_up([phase.predicted_s or 0.0 for phase in phases])
    *measured, measured_step = seconds_that_add_up([phase.measured_s for phase in phases])
    cells = [
        [
            predicted[i] if phase.predicted_s else "-",
            measured[i] if phase.measured_s else "-",
            "-" if phase.ratio is None else f"{phase.ratio:.2f}",
        ]
        for i, phase in enumerate(phases)
    ]
    return [*cells, [predicted_step, measured_step]]


def typical_steps(step_s: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the half of the chosen steps whose time is closest to their median, at least one.

    In a run that changed from fast to slow steps they are of one kind, and not a mixture.

    Args:
        step_s: step times, shape (steps,).
        chosen: mask of the same shape; at least one step is chosen.
    """
    steps = np.flatnonzero(chosen)
    distance_s = np.abs(step_s[steps] - np.median(step_s[steps]))
    return np.asarray(steps[np.argsort(distance_s, kind="stable")[: (len(steps) + 1) // 2]])


def undisturbed(steps: int, stragglers: Sequence[Straggler]) -> np.ndarray:
    """Return a mask over `steps`: after the warm-up and without the steps in which a rank was late.

    The warm-up is 10 steps, but at most a third of the steps. Which steps an intermittent,
    recurring or rare straggler delayed is not known here: if they are less than a third of its
    range, the whole range stays, since they hardly move a median.
    """
    chosen = np.ones(steps, dtype=bool)
    chosen[: min(WARM_UP_STEPS, steps // 3)] = False
    for late in stragglers:
        if late.shape in ("intermittent", "recurring", "rare") and late.late_share < _FEW:
            continue
        every = late.period_steps if late.shape == "periodic" else 1
        chosen[late.first_step : late.last_step + 1 : max(1, every)] = False
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
