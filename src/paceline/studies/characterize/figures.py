"""Figures of repeats: the mean, and the interval that another sweep's mean is expected to meet.

Repeats of all cells are run by turns, so that what drifts on the machine within the sweep (clock
rates, other users) is among the spread of each cell's repeats. Three repeats say little about their
spread, and those that happen to agree do not prove a machine without noise, so that a cell borrows
from the others. On the logarithmic scale, with n repeats and variance s^2::

    variance   = (d0 pooled^2 + (n - 1) s^2) / (d0 + n - 1)        d0 = `BORROWED`, 0 for one cell
    half width = t(0.975, d0 + n - 1) x sqrt(variance / n)

`pooled` is the deviation of all cells' repeats together. Two sweeps agree where the difference of
their logarithms is within the square root of the sum of the squared half widths.
Source: G. Smyth, Linear models and empirical Bayes methods, Stat. Appl. Genet. Mol. Biol. 3, 2004
(moderated t; here with a fixed d0); G. Box, W. Hunter, J. Hunter, Statistics for Experimenters, 2nd
edition, section 3.3 (randomised blocks).
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.scaling_profile import RepeatedFigure
from paceline.core.students_t import t_95

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BORROWED = 4  # degrees of freedom that a cell has of the other cells' spread


class PooledSpread(NamedTuple):
    """The deviation of logarithms around their cells' means, and its degrees of freedom."""

    log_sd: float
    freedom: int


def repeated(values: Sequence[float], pooled: PooledSpread | None = None) -> RepeatedFigure:
    """Return the figure of repeats.

    Args:
        values: positive, at least one.
        pooled: of all cells, this one included; None: the cell's own spread alone counts.
    """
    if len(values) < 2:
        return RepeatedFigure(value=values[0], repeats=1)
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / len(logs)
    own = len(logs) - 1
    borrowed = max(0, min(BORROWED, pooled.freedom - own)) if pooled else 0
    squares = own * statistics.variance(logs)
    squares += borrowed * pooled.log_sd**2 if pooled else 0.0
    freedom = own + borrowed
    width = t_95(freedom) * math.sqrt(squares / freedom / len(logs))
    return RepeatedFigure(
        value=math.exp(mean),
        low=math.exp(mean - width),
        high=math.exp(mean + width),
        variation=statistics.stdev(values) / statistics.fmean(values),
        repeats=len(logs),
    )


def plain(values: Sequence[float]) -> RepeatedFigure:
    """Return the arithmetic mean of repeats of a figure that may be 0 or less, as a loss or score.

    The interval is that of `repeated` on the plain scale, of the cell's own deviation.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return RepeatedFigure(value=mean, repeats=1)
    deviation = statistics.stdev(values)
    width = t_95(len(values) - 1) * deviation / math.sqrt(len(values))
    return RepeatedFigure(
        value=mean,
        low=mean - width,
        high=mean + width,
        variation=deviation / abs(mean) if mean else None,
        repeats=len(values),
    )


def pool(cells: Iterable[Sequence[float]]) -> PooledSpread:
    """Return the spread of the repeats of all cells; 0 where no cell was repeated."""
    squares, freedom = 0.0, 0
    for values in cells:
        if len(values) > 1:
            logs = [math.log(value) for value in values]
            squares += statistics.variance(logs) * (len(logs) - 1)
            freedom += len(logs) - 1
    return PooledSpread(math.sqrt(squares / freedom) if freedom else 0.0, freedom)


def agree(first: RepeatedFigure, second: RepeatedFigure) -> bool:
    """Return whether two sweeps' figures differ by no more than their intervals allow.

    >>> wide = RepeatedFigure(value=10.0, low=9.0, high=11.1, repeats=3)
    >>> agree(wide, RepeatedFigure(value=11.2, low=10.2, high=12.3, repeats=3))
    True
    >>> agree(wide, RepeatedFigure(value=13.0, low=12.0, high=14.1, repeats=3))
    False
    """
    widths = [
        math.log(figure.high / figure.low) / 2 if figure.low and figure.high else 0.0
        for figure in (first, second)
    ]
    return abs(math.log(first.value / second.value)) <= math.hypot(*widths)
