"""Finds the shape of one rank's delay, and its p-value: how likely noise alone produces it.

A series holds, for each step, how much later one rank was than the others; without a straggler it
is noise around zero. Five shapes are tried, each with a test of its own, because a mean over all
steps hides what happens in every twentieth:

    persistent    a range of steps that are late, perhaps all   medians of batches, Student's t
    periodic      every k-th step is late                       phase folding (steps modulo k),
                                                                Hoeffding's bound
    drifting      later and later, or less and less             Theil-Sen slope, Mann-Kendall test
    intermittent  episodes of late steps, without a rhythm      share of all episodes, binomial test
    recurring     blocks of many late steps, several times      sum of lengths, Karlin-Altschul

Noise of a busy node comes in bursts, so steps next to each other are not independent. No test
assumes independence: means and medians are of batches of steps, phase folding compares steps that
lie k apart, episodes count once, however long they are, and a range must be longer than the bursts
of the other ranks.

Of the shapes with a p-value that is small enough, the one that describes the series best is
returned: the smallest Bayesian information criterion under Laplace noise (G. Schwarz, Estimating
the dimension of a model, 1978), which asks shapes with more parameters to fit better. A delay
whose slope changes looks like autocorrelated noise to the drift test, which then gives it too large
a p-value. So, once another test has passed, a drift of up to _DRIFT_P_VALUE competes as well.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.analysis.blocks import recurring
from paceline.trace.analysis.periods import periodic
from paceline.trace.analysis.shapes import (
    MIN_STEPS,
    Pattern,
    PatternRules,
    drifting,
    intermittent,
    persistent,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of a drift that may describe a delay that another test has found; corrected for multiple tests.
_DRIFT_P_VALUE = 0.1
_PART = 0.8  # of the late steps of episodes, within blocks


def find_pattern(series: np.ndarray, others: np.ndarray, rules: PatternRules) -> Pattern | None:
    """Return the pattern that describes a rank's delay best; None if noise may have made it.

    Args:
        series: delay of the rank in each step, noise around zero otherwise, shape (steps,),
            seconds.
        others: the series of other ranks, shape (other ranks, steps).
        rules: the thresholds: from how many seconds a step is late, and the largest p-value.
    """
    if len(series) < MIN_STEPS:
        return None
    typical = _typical(series, rules.late_threshold_s)
    if typical == 0.0:
        return None
    clipped = np.clip(series, -3 * typical, 3 * typical)
    drift = drifting(clipped, rules)
    found = [
        persistent(clipped, others, rules),
        periodic(clipped, rules),
        drift,
        intermittent(clipped, others, rules),
        recurring(clipped, others, rules),
    ]
    passed = [pattern for pattern in found if pattern and pattern.p_value <= rules.max_p_value]
    if not passed:
        return None
    if drift is not None and rules.max_p_value < drift.p_value <= _DRIFT_P_VALUE:
        passed.append(drift)
    best = min(
        _without_parts(passed),
        key=lambda pattern: _criterion(clipped, pattern, rules.late_threshold_s),
    )
    return dataclasses.replace(best, p_value=min(pattern.p_value for pattern in passed))


def _without_parts(passed: Sequence[Pattern]) -> list[Pattern]:
    """Return the patterns without episodes that are parts of recurring blocks."""
    blocks = [pattern for pattern in passed if pattern.shape == "recurring"]
    return [
        pattern
        for pattern in passed
        if pattern.shape != "intermittent"
        or not any(np.mean(block.late[pattern.late]) >= _PART for block in blocks)
    ]


def _typical(series: np.ndarray, late_threshold_s: float) -> float:
    late = series[series > late_threshold_s]
    return float(np.median(late)) if len(late) else 0.0


def _criterion(series: np.ndarray, pattern: Pattern, late_threshold_s: float) -> float:
    """Return the Bayesian information criterion.

    Differences between misfits far below a tenth of `late_threshold_s` hardly change it.
    """
    misfit = float(np.mean(np.abs(series - pattern.fitted_s))) + late_threshold_s / 10
    return 2 * len(series) * math.log(misfit) + pattern.parameters * math.log(len(series))
