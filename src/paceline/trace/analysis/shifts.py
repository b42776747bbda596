"""Changes of all ranks within a run: from some step on every rank is slower, or faster.

No rank is late then, and medians over all steps hide it. Compared are the ranks' step times without
waiting for other ranks, so that one straggler does not make all ranks look slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.record import Record
from paceline.trace.analysis.p_values import upper_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.phases import RankPhases

_WAITING = PHASES.index("waiting")
_MIN_STEPS, _MIN_SHARE = 10, 1 / 32  # of the run, on either side of a change
_WARM_UP = 5  # steps that do not count: the first ones of a run are slow
_LEAST_FACTOR = 1.3  # a smaller change is no news
_MAX_P_VALUE = 1e-6
_LEAST_S = 1e-6  # of a step without waiting: a factor needs a denominator
_MOST = 8  # changes that are reported
_MOST_POINTS = 4096  # more steps are taken together in medians


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift(Record):
    """A change of all ranks.

    Attributes:
        step: the first step after the change.
        factor: step time after the change over that before it; above 1 is slower.
        before_ms: median time of a step before the change, back to the change before it, without
            waiting for other ranks, milliseconds.
        after_ms: the same after the change, up to the next one.
    """

    step: int
    factor: float
    before_ms: float
    after_ms: float


def find_shifts(ranks: Sequence[RankPhases]) -> tuple[Shift, ...]:
    """Return the changes of all ranks within the run, in order of steps.

    The lower median over ranks of that time is cut around the range of steps that differs most from
    the others, then each part again, as long as noise alone hardly produces a cut; cuts at which
    the median hardly changes are then taken back.
    Sources: circular binary segmentation, A. Olshen and others (2004); the test is that of H. Mann
    and D. Whitney (1947), corrected for the number of ranges.

    Args:
        ranks: phases of each rank of the run.
    """
    steps = min((rank.steps for rank in ranks), default=0)
    if steps < _WARM_UP + 2 * _MIN_STEPS:
        return ()
    own_s = np.array([rank.step_s[:steps] - rank.seconds[:steps, _WAITING] for rank in ranks])
    own_s = np.maximum(_LEAST_S, own_s)  # a step may be all waiting
    usual_s = np.sort(own_s, axis=0)[(len(own_s) - 1) // 2, _WARM_UP:]
    size = -(-len(usual_s) // _MOST_POINTS)
    points_s = np.array([np.median(part) for part in _parts(usual_s, size)])
    least = max(_MIN_STEPS, int(_MIN_SHARE * len(points_s)))
    cuts = _merged(points_s, sorted(_cuts(points_s, 0, len(points_s), least)))
    levels_s = _levels(points_s, cuts)
    shifts = [
        Shift(
            step=_WARM_UP + size * cut,
            factor=after_s / before_s,
            before_ms=1e3 * before_s,
            after_ms=1e3 * after_s,
        )
        for cut, (before_s, after_s) in zip(cuts, pairwise(levels_s), strict=True)
    ]
    return tuple(shifts[:_MOST])


def _parts(values: np.ndarray, size: int) -> list[np.ndarray]:
    return np.split(values, range(size, len(values), size))


def _cuts(values: np.ndarray, begin: int, end: int, least: int) -> list[int]:
    """Return where `values[begin:end]` is cut into parts of `least` or more, in any order."""
    found = _best_range(values[begin:end], least)
    if found is None:
        return []
    edges = sorted({begin, *(begin + cut for cut in found), end})
    inner = [_cuts(values, *part, least) for part in pairwise(edges)]
    return [*edges[1:-1], *(cut for cuts in inner for cut in cuts)]


def _best_range(values: np.ndarray, least: int) -> tuple[int, int] | None:
    """Return the range that differs most clearly from the rest; None if none does.

    It lies between the largest and the smallest sum of the values' ranks, less their mean; or it
    begins with the values and ends where that sum is largest for its length.
    """
    count = len(values)
    if count < 2 * least:
        return None
    ranked = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (count - 1) / 2
    sums = np.concatenate([[0.0], np.cumsum(ranked)])
    low, high = int(sums.argmin()), int(sums.argmax())
    after = np.arange(least, count - least + 1)
    single = int(after[np.argmax(np.abs(sums[after]) / np.sqrt(after * (count - after)))])
    best, best_score = None, 0.0
    for first, end in ((min(low, high), max(low, high)), (0, single)):
        first, end = 0 if first < least else first, count if count - end < least else end
        inside = end - first
        if inside < least or count - inside < least:
            continue
        spread = math.sqrt(inside * (count - inside) * (count + 1) / 12)
        score = abs(float(sums[end] - sums[first])) / spread
        if score > best_score:
            best, best_score = (first, end), score
    return best if count**2 * upper_tail(best_score) <= _MAX_P_VALUE else None


def _levels(values: np.ndarray, cuts: Sequence[int]) -> list[float]:
    """Return the median of each part between two cuts."""
    return [float(np.median(values[a:b])) for a, b in pairwise([0, *cuts, len(values)])]


def _factor(one_s: float, other_s: float) -> float:
    """Return how many times the larger is the smaller one."""
    smaller, larger = sorted((one_s, other_s))
    return larger / max(1e-9, smaller)


def _merged(values: np.ndarray, cuts: list[int]) -> list[int]:
    """Return the cuts without those at which the level hardly changes from part to part."""
    kept = list(cuts)
    while kept:
        factors = [_factor(*pair) for pair in pairwise(_levels(values, kept))]
        least = int(np.argmin(factors))
        if factors[least] >= _LEAST_FACTOR:
            return kept
        del kept[least]
    return kept
