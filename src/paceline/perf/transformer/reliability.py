"""What large scale costs beside the step: waiting for the slowest rank, checkpoints, failures.

Stragglers: of n ranks whose step varies with a standard deviation of s, the slowest takes about
``s sqrt(2 ln n)`` longer than the mean; all wait for it. Failures: with a checkpoint of C seconds
and a mean time M between failures of the job, a checkpoint every ``sqrt(2 C M)`` seconds loses
least; lost is C in each interval, and half an interval and the restart in each failure.

Sources: David and Nagaraja, Order statistics, 2003 (extremes of the normal distribution); Young, A
first order approximation to the optimum checkpoint interval, CACM 1974; Daly, A higher order
estimate, FGCS 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def straggler_wait_s(step_s: float, jitter: float, ranks: int) -> float:
    """Return the seconds that a step waits for the slowest of its ranks.

    Args:
        step_s: mean of a rank's step.
        jitter: standard deviation of a rank's step over its mean.
        ranks: that wait for each other.
    """
    return step_s * jitter * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """When to write checkpoints.

    Attributes:
        interval_s: between two checkpoints.
        useful_share: of the time, spent on steps that are not lost.
    """

    interval_s: float
    useful_share: float


def checkpoint_plan(
    checkpoint_s: float, failure_s: float, restart_s: float = 0.0
) -> CheckpointPlan:
    """Return the interval that loses the least time.

    Args:
        checkpoint_s: in which the job writes a checkpoint and does nothing else.
        failure_s: mean time between failures of the job: that of a node over the number of nodes.
        restart_s: from a failure to the first new step.

    With failures as frequent as checkpoints take, nothing useful is done.
    """
    interval_s = min(math.sqrt(2 * checkpoint_s * failure_s), failure_s)
    lost = checkpoint_s / (interval_s + checkpoint_s)
    lost += (interval_s / 2 + checkpoint_s + restart_s) / failure_s
    return CheckpointPlan(interval_s, max(0.0, 1 - lost))
