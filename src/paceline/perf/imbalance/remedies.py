"""Changes measured steps as a remedy would: what each node's slowest rank takes with it.

Each remedy takes away what was measured, and nothing else:

- CPU budget: cores of its own for each rank, so that its main thread never waits for one. What
  switches and migrations cost beyond that time is not in it. Busy cores set a limit: a step takes
  no less than the CPU time of a node's ranks and loader workers over its cores.
- Paced input: loader workers refill while the rank waits or communicates. It takes away time
  without a core, as far as there is such time to refill in.
- Rebalancing: shares of the batch, from medians over a window of steps, within bounds, if they
  promise the measured ranks a gain that is worth it. The shares are judged by the steps that follow
  the window, so that they also pay for noise that the window took for a difference.

How many copies of a node there are changes none of this: copies of the same nodes have the same
mean, from which shares follow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from paceline.perf.imbalance.parts import BusyParts

_MOST_WINDOWS = 48  # of the controller that are tried
_BISECTIONS = 40
# Standard error of a median over the median absolute deviation, times the root of the count: of
# normally distributed values, 1.2533 standard errors of a mean, and 1.4826 deviations in a sigma.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826


def without_core_waits(parts: BusyParts) -> BusyParts:
    """Return the steps of ranks that have cores of their own."""
    assert parts.no_core_s is not None
    return _faster(parts, parts.no_core_s)


def with_paced_input(parts: BusyParts) -> BusyParts:
    """Return the steps of ranks whose loaders refill while the rank waits or communicates.

    A queue of batches evens refills out over steps, so that the means decide how much of them finds
    room.
    """
    assert parts.no_core_s is not None
    room_s = parts.free_s.mean(axis=1)
    wanted_s = np.maximum(1e-12, parts.no_core_s.mean(axis=1))
    return _faster(parts, parts.no_core_s * np.minimum(1.0, room_s / wanted_s)[:, None])


def at_least(parts: BusyParts, measured: BusyParts) -> BusyParts:
    """Return steps that are not shorter than the work of the cores of a node, on average.

    Where a remedy took more away, busy times grow in proportion, so that they keep their noise.

    Args:
        parts: with a remedy.
        measured: without.
    """
    least_s = min(parts.least_step_s - parts.communication_s, _node_mean_s(measured))
    factor = max(1.0, least_s / max(_node_mean_s(parts), 1e-12))
    return replace(parts, busy_s=parts.busy_s * factor, sharable_s=parts.sharable_s * factor)


def _node_mean_s(parts: BusyParts) -> float:
    """Return what the slowest rank of a node takes, on average."""
    return float(np.mean([values.mean() for values in node_maxima(parts.busy_s, parts.nodes)]))


def _faster(parts: BusyParts, saved_s: np.ndarray) -> BusyParts:
    """Return steps that are shorter, and their sharable part in proportion."""
    left = 1 - saved_s / np.maximum(1e-12, parts.busy_s)
    return replace(parts, busy_s=parts.busy_s - saved_s, sharable_s=parts.sharable_s * left)


def node_maxima(busy_s: np.ndarray, nodes: np.ndarray) -> list[np.ndarray]:
    """Return what the slowest rank of each node takes, one array of shape `busy_s.shape[1:]` each.

    Args:
        busy_s: shape (ranks, ...), seconds.
        nodes: number of the node of each rank, shape (ranks,).
    """
    return [busy_s[nodes == node].max(axis=0) for node in range(int(nodes.max()) + 1)]


def rebalanced(
    parts: BusyParts,
    *,
    window_steps: int,
    least_gain: float,
    noise_factor: float,
    least_share: float,
    most_share: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return busy times with shares of the batch by measured speed, and the numbers of their steps.

    Args:
        parts: the steps without it. Windows go around the end of the run to its begin.
        window_steps: steps from which the controller takes its medians.
        least_gain: share of the step that a change must promise.
        noise_factor: standard errors of the noisiest rank's median that it must promise, too.
        least_share: of the batch, that a rank keeps; a share is 1 on average.
        most_share: that a rank gets.

    Returns:
        Busy seconds, shape (ranks, windows, steps judged), and which measured step each of them is,
        shape (windows, steps judged).
    """
    steps = parts.steps
    window = min(window_steps, steps // 2)
    starts = np.arange(0, steps, max(1, steps // _MOST_WINDOWS))
    measured = (starts[:, None] + np.arange(window)) % steps
    judged = (starts[:, None] + np.arange(window, 2 * window)) % steps
    busy_s = np.median(parts.busy_s[:, measured], axis=2)
    sharable_s = np.minimum(busy_s, np.median(parts.sharable_s[:, measured], axis=2))
    shares, ready_s = equal_shares(sharable_s, busy_s - sharable_s, least_share, most_share)
    slowest_s = busy_s.max(axis=0)
    away_s = np.median(np.abs(parts.busy_s[:, measured] - busy_s[:, :, None]), axis=2)
    error_s = _ERROR_OF_MEDIAN / math.sqrt(window) * away_s
    noise_s = error_s.max(axis=0)
    least_s = np.maximum(least_gain * (slowest_s + parts.communication_s), noise_factor * noise_s)
    worth_it = slowest_s - ready_s > least_s
    shares = np.where(worth_it, shares, 1.0)
    changed_s = parts.sharable_s[:, judged] * (shares[:, :, None] - 1)
    return parts.busy_s[:, judged] + changed_s, judged


def equal_shares(
    sharable_s: np.ndarray, fixed_s: np.ndarray, least_share: float, most_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return shares with which all ranks take equally long, as far as bounds allow, and how long.

    A rank with share s takes fixed + s sharable. All take T if s = (T - fixed) / sharable; T
    follows from the sum of the shares, which grows with it, so that bisection finds it.

    Args:
        sharable_s: of each rank with share 1, shape (ranks, ...), seconds.
        fixed_s: of each rank with any share, shaped as `sharable_s`.
        least_share: of a rank.
        most_share: of a rank.

    Returns:
        Shares, 1 on average, shaped as `sharable_s`; and when the last rank is ready, shape (...).
    """
    work_s = np.maximum(1e-9, sharable_s)
    low_s = fixed_s.min(axis=0)
    high_s = (fixed_s + most_share * work_s).max(axis=0)

    def shares_at(time_s: np.ndarray) -> np.ndarray:
        return np.asarray(np.clip((time_s - fixed_s) / work_s, least_share, most_share))

    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        enough = shares_at(middle_s).sum(axis=0) >= len(work_s)
        low_s, high_s = np.where(enough, low_s, middle_s), np.where(enough, middle_s, high_s)
    shares = shares_at(high_s)
    return shares, (fixed_s + shares * work_s).max(axis=0)
