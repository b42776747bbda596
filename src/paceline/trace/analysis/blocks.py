"""Recurring blocks: a rank is late for many steps on end, then on time for as many, and so on.

One block is a range of steps (`shapes.persistent`), and many short ones are episodes
(`shapes.intermittent`). Between them lie a few long blocks: each ends far from where the run does,
and they are too few to be counted against the episodes of other ranks. What tells them from noise
is how long each of them is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.trace.analysis.shapes import MIN_STEPS, Pattern, PatternRules, bursts_of, scores_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIN_BLOCKS = 3
_MIN_BURST = 4.0  # mean score of noise, of which two or three bursts say too little
_RHYTHM = 0.15  # of the period, by which the beginnings of blocks may miss it


class _Block(NamedTuple):
    first: int
    last: int


def recurring(series: np.ndarray, others: np.ndarray, rules: PatternRules) -> Pattern | None:
    """Return the blocks in which the rank is late in most steps, if there are several.

    A step late by half of what is usual for late steps scores 0, one on time -1, one late by all of
    it 1. A block begins where the sum of the scores leaves zero, and ends at its highest sum before
    `MIN_STEPS` steps on time. The sum over r blocks of scores as bursts of noise have them, in
    units of the mean of the other ranks' bursts, and beyond what so many bursts let expect, is at
    least x in noise with a probability of exp(-x) x^(r-1) / (r! (r-1)!).
    Source: S. Karlin and S. Altschul, Applications and statistics for multiple high-scoring
    segments in molecular sequences (1993); the end of a block is BLAST's X-drop (1990).
    """
    positive = series[series > rules.late_threshold_s]
    if len(positive) < _MIN_BLOCKS * MIN_STEPS:
        return None
    level_s = max(rules.late_threshold_s, float(np.median(positive)) / 2)
    blocks = [
        block
        for block in _blocks(scores_of(series, level_s))
        if block.last - block.first + 1 >= MIN_STEPS
        and np.mean(series[block.first : block.last + 1] > level_s) >= rules.min_late_steps
    ]
    if len(blocks) < _MIN_BLOCKS:
        return None
    late = np.zeros(len(series), dtype=bool)
    for block in blocks:
        late[block.first : block.last + 1] = True
    first, last = blocks[0].first, blocks[-1].last
    inside = float(np.median(series[late]))
    between = float(np.median(series[first : last + 1][~late[first : last + 1]]))
    if inside - between < rules.late_threshold_s or between > inside / 2:
        return None
    return Pattern(
        shape="recurring",
        first=first,
        last=last,
        late=late,
        fitted_s=np.where(late, inside, 0.0),
        parameters=1 + 2 * len(blocks),
        p_value=min(1.0, rules.series * _p_value(series, blocks, others, rules)),
        period=_period([block.first for block in blocks]),
        block=int(np.median([block.last - block.first + 1 for block in blocks])),
    )


def _blocks(scores: np.ndarray) -> list[_Block]:
    """Return the blocks in order."""
    found = []
    total, best, first, last = 0.0, 0.0, 0, 0
    for step, score in enumerate([*scores.tolist(), -math.inf]):  # the end ends the last one
        if total == 0.0:
            first = step
        total += score
        if total > best:
            best, last = total, step
        if total <= 0.0 or best - total >= MIN_STEPS:
            if best > 0.0:
                found.append(_Block(first, last))
            total, best = 0.0, 0.0
    return found


def _p_value(
    series: np.ndarray, blocks: Sequence[_Block], others: np.ndarray, rules: PatternRules
) -> float:
    mean, count = bursts_of(others, rules.late_threshold_s)
    scores = scores_of(series, rules.late_threshold_s)
    r, total = len(blocks), sum(scores[first : last + 1].sum() for first, last in blocks)
    x = float(total) / max(mean, _MIN_BURST) - r * math.log(1 + count)
    if x <= r:  # the formula holds for large x
        return 1.0
    return min(1.0, math.exp((r - 1) * math.log(x) - x - math.lgamma(r + 1) - math.lgamma(r)))


def _period(begins: Sequence[int]) -> int:
    """Return the steps from one beginning to the next; 0 if there is no rhythm in them.

    A block that noise has hidden leaves a distance of two periods.
    """
    distances = np.diff(begins)
    period = float(np.median(distances))
    misses = np.abs(distances - period * np.maximum(1.0, np.round(distances / period)))
    return round(period) if np.all(misses <= _RHYTHM * period) else 0
