"""The slowest of many independent nodes, from measured values of a few.

If F is the distribution of what one node takes, the slowest of n takes at most x with the
probability F(x)^n. So no node is drawn by lot: the expected maximum of 12,288 nodes is one sum over
the measured values, exact for their empirical distribution. With nodes of several kinds, a node
that was measured as slow stays as frequent as it was::

    F(x) = F_1(x)^c F_2(x)^c ...        c copies of each measured node

The empirical distribution ends at its largest value: of more ranks than there were measured values,
the slowest is that value in every step, which is too little. The ``pareto`` tail continues it
beyond the threshold above which a tenth of the values lie.

Source: generalized Pareto tail: J. Pickands, Statistical inference using extreme order statistics
(1975); its fit by probability-weighted moments: J. Hosking and J. Wallis, Parameter and quantile
estimation for the generalized Pareto distribution (1987).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Tail = Literal["measured", "pareto"]
TAIL_SHARE = 0.1  # of the values, the largest, to which the tail is fitted
_LEAST_EXCESSES = 10
SHAPES = (-0.5, 0.25)  # of tails: outside, moments fit badly, and few values decide
_GRID = 4096  # values at which distributions are taken, at most
_TAIL_GRID = 1024
_BEYOND = 1e-6  # probability that the slowest node is beyond the grid


class Maxima(NamedTuple):
    """What the slowest of so many nodes takes, for several numbers of nodes.

    Attributes:
        mean_s: its expectation, shape (numbers,), seconds.
        p95_s: what it takes at most in 95 of 100 steps, shaped as `mean_s`.
    """

    mean_s: np.ndarray
    p95_s: np.ndarray


class ParetoTail(NamedTuple):
    """P(X > threshold + y) = share (1 + shape y / scale)^(-1/shape); exponential at shape 0."""

    threshold_s: float
    share: float
    shape: float
    scale_s: float

    def exceeded(self, values_s: np.ndarray) -> np.ndarray:
        """Return the probability that a value is exceeded; for values above the threshold."""
        scaled = np.maximum(0.0, values_s - self.threshold_s) / self.scale_s
        if abs(self.shape) < 1e-6:
            return np.asarray(self.share * np.exp(-scaled))
        base = np.maximum(0.0, 1 + self.shape * scaled)
        with np.errstate(divide="ignore"):
            return np.asarray(self.share * base ** (-1 / self.shape))

    def quantile_s(self, probability: float) -> float:
        """Return the value that is exceeded with a probability of at most `share`."""
        ratio = self.share / probability
        if abs(self.shape) < 1e-6:
            return self.threshold_s + self.scale_s * float(np.log(ratio))
        return self.threshold_s + self.scale_s / self.shape * float(ratio**self.shape - 1)


def fit_tail(values_s: np.ndarray) -> ParetoTail | None:
    """Return the tail of measured values; None where they are too few, or all alike.

    Args:
        values_s: shape (values,), seconds.
    """
    ordered = np.sort(values_s)
    count = int(TAIL_SHARE * len(ordered))
    if count < _LEAST_EXCESSES:
        return None
    threshold_s = float(ordered[-count - 1])
    excess_s = ordered[-count:] - threshold_s
    mean_s = float(excess_s.mean())
    if mean_s <= 0.0:
        return None
    places = (np.arange(1, count + 1) - 0.35) / count
    moment_s = float(((1 - places) * excess_s).mean())
    if mean_s <= 2 * moment_s:
        shape = SHAPES[1]
    else:
        shape = min(max(2 - mean_s / (mean_s - 2 * moment_s), SHAPES[0]), SHAPES[1])
    # The scale that keeps the mean excess, scale / (1 - shape), where the shape was limited.
    return ParetoTail(threshold_s, count / len(ordered), shape, mean_s * (1 - shape))


def slowest(
    nodes: Sequence[np.ndarray], copies: Sequence[float], tail: Tail = "measured"
) -> Maxima:
    """Return what the slowest of so many copies of each node takes.

    Args:
        nodes: values of each measured node, shape (values,) each, seconds.
        copies: of each node; 1 or more, not necessarily whole.
        tail: beyond the largest measured values.
    Cost: a few operations for each value of `nodes`; `copies` cost next to nothing.
    """
    tails = [fit_tail(values) if tail == "pareto" else None for values in nodes]
    grid_s = _grid(nodes, tails, max(copies))
    with np.errstate(divide="ignore"):
        log_shares = sum(
            np.log(_distribution(values, own, grid_s))
            for values, own in zip(nodes, tails, strict=True)
        )
    shares = np.exp(np.asarray(copies)[:, None] * log_shares)
    shares[:, -1] = 1.0
    weights = np.concatenate([shares[:, :1], shares[:, 1:] - shares[:, :-1]], axis=1)
    return Maxima(weights @ grid_s, grid_s[np.argmax(shares >= 0.95, axis=1)])


def _grid(
    nodes: Sequence[np.ndarray], tails: Sequence[ParetoTail | None], copies: float
) -> np.ndarray:
    """Return ascending values at which distributions are taken, up to almost any slowest node."""
    grid_s = np.unique(np.concatenate(nodes))
    if len(grid_s) > _GRID:  # the largest decide: each of them stays
        rest = np.linspace(0, len(grid_s) - _GRID // 2, _GRID // 2, endpoint=False).astype(int)
        grid_s = np.concatenate([grid_s[rest], grid_s[-_GRID // 2 :]])
    fitted = [tail for tail in tails if tail is not None]
    if fitted:
        probability = _BEYOND / copies / len(nodes)
        end_s = max(tail.quantile_s(probability) for tail in fitted)
        begin_s = min(tail.threshold_s for tail in fitted)
        further = begin_s + (end_s - begin_s) * np.linspace(0, 1, _TAIL_GRID) ** 2
        grid_s = np.unique(np.concatenate([grid_s, further]))
    return grid_s


def _distribution(values_s: np.ndarray, tail: ParetoTail | None, grid_s: np.ndarray) -> np.ndarray:
    """Return the share of a node's steps that take at most each value of the grid."""
    ordered = np.sort(values_s)
    shares = np.searchsorted(ordered, grid_s, side="right") / len(ordered)
    if tail is not None:
        beyond = grid_s > tail.threshold_s
        shares[beyond] = 1 - tail.exceeded(grid_s[beyond])
    return shares
