"""Finds the shape of one rank's delay over the steps of a run, and how likely noise makes it.

A series is what one rank was later than the other ranks in each step; without a straggler it is
noise around zero. Four shapes are tried, each with a test of its own, because a mean over all steps
hides what happens in every twentieth:

    persistent    a range of steps that are late, perhaps all   medians of batches, Student's t
    periodic      every k-th step is late                       folding, Hoeffding's bound
    drifting      later and later, or less and less             Theil-Sen slope, Mann-Kendall test
    intermittent  episodes of late steps, without a rhythm      episodes over ranks, binomial test

Noise of a busy node comes in bursts, so steps next to each other are not independent. No test
takes them for that: means and medians are of batches of steps, a fold compares steps that lie far
apart, episodes count once, however long they are, and a range must be longer than the bursts of
the other ranks.

Of the shapes that noise hardly makes, the one that describes the series best is returned: the
smallest Bayesian information criterion under Laplace noise (G. Schwarz, Estimating the dimension of
a model, 1978), which asks shapes with more parameters to fit better. The test of lines takes a bend
in a line for noise with a memory: once another test has found a delay, a line that noise seldom
makes may describe it, too.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from paceline.trace.analysis.periods import periodic
from paceline.trace.analysis.shapes import (
    MIN_STEPS,
    Pattern,
    PatternRules,
    drifting,
    intermittent,
    persistent,
)

_LINE_CHANCE = 0.1  # up to which a line may describe a delay that another test has found


def find_pattern(series: np.ndarray, others: np.ndarray, rules: PatternRules) -> Pattern | None:
    """Return the pattern that describes a rank's delay best; None if noise may have made it.

    Args:
        series: delay of the rank in each step, noise around zero otherwise, shape (steps,),
            seconds.
        others: the series of other ranks, shape (other ranks, steps).
        rules: the limits.
    """
    if len(series) < MIN_STEPS:
        return None
    typical = _typical(series, rules.least_s)
    if typical == 0.0:
        return None
    clipped = np.clip(series, -3 * typical, 3 * typical)
    line = drifting(clipped, rules)
    found = [
        persistent(clipped, others, rules),
        periodic(clipped, rules),
        line,
        intermittent(clipped, others, rules),
    ]
    passed = [pattern for pattern in found if pattern and pattern.chance <= rules.max_chance]
    if not passed:
        return None
    if line is not None and rules.max_chance < line.chance <= _LINE_CHANCE:
        passed.append(line)
    best = min(passed, key=lambda pattern: _criterion(clipped, pattern, rules.least_s))
    return dataclasses.replace(best, chance=min(pattern.chance for pattern in passed))


def _typical(series: np.ndarray, least_s: float) -> float:
    late = series[series > least_s]
    return float(np.median(late)) if len(late) else 0.0


def _criterion(series: np.ndarray, pattern: Pattern, least_s: float) -> float:
    """Return the Bayesian information criterion; misfit far below `least_s` is no better."""
    misfit = float(np.mean(np.abs(series - pattern.fitted_s))) + least_s / 10
    return 2 * len(series) * math.log(misfit) + pattern.parameters * math.log(len(series))
