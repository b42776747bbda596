"""What distance costs: the gradient exchange of a step over the worst link of a placement.

A step of a job on n devices is compute, plus what is left of its exchange after the overlap::

    step(level) = compute + max(0, exchange(level) - overlap x compute)
    exchange    = 2 (n - 1) alpha + 2 (n - 1) / n x bytes / beta          a ring all-reduce

alpha and beta are latency and bandwidth of the level at which the devices are farthest apart. The
factor of a placement is step(0) / step(level): 1 inside a node, and 1 anywhere for a job that
exchanges little or overlaps all of it: on fast links locality gains about nothing.
Source: R. Hockney 1994 (alpha-beta); J. Han et al., MARBLE, CCGrid 2020 (fast links).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.scheduler.cluster import Level


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of a job exchange in each step.

    Attributes:
        message_bytes: of the gradients.
        compute_s: of one step, without the exchange.
        overlap: share of the compute under which the exchange can hide.
    """

    message_bytes: float
    compute_s: float
    overlap: float = 0.5


def step_s(exchange: Exchange, devices: int, level: Level) -> float:
    """Return the seconds of one step with all exchange over one level."""
    if devices == 1:
        return exchange.compute_s
    latency_s = 2 * (devices - 1) * level.latency_s
    volume = 2 * (devices - 1) / devices * exchange.message_bytes
    transfer_s = volume / level.bandwidth_bytes_per_s if level.bandwidth_bytes_per_s else 0.0
    hidden_s = exchange.overlap * exchange.compute_s
    return exchange.compute_s + max(0.0, latency_s + transfer_s - hidden_s)


def distance_factor(
    exchange: Exchange, devices: int, level: int, levels: Sequence[Level], near: int = 0
) -> float:
    """Return the rate at a level relative to that at a nearer one.

    Args:
        exchange: of the job.
        devices: of the placement.
        level: of its worst link; beyond the last of `levels`, the last one counts.
        levels: from inside a node upwards; empty: distance makes no difference.
        near: the level at which the rate is known: 0 inside a node.
    """
    if not levels or level <= near:
        return 1.0
    close, far = (levels[min(index, len(levels) - 1)] for index in (near, level))
    return step_s(exchange, devices, close) / step_s(exchange, devices, far)
