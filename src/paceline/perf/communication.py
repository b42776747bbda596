"""What data-parallel training pays for keeping its ranks alike.

An all-reduce of n bytes between p ranks, from figures that were measured between two::

    seconds = (p - 1) * latency + n * 2 (p - 1) / p / bandwidth

At p = 2 it is the measurement itself; for many ranks the second term tends to 2 n / bandwidth, the
bound of the ring, and the first grows with the ring's length.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009; Thakur, Rabenseifner,
Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.machine import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        bytes: their size.
        ready_s: when the last of them is there, from the start of the backward pass.
    """

    bytes: int
    ready_s: float


def make_buckets(
    gradients: Sequence[tuple[int, float]], *, bucket_bytes: int, first_bucket_bytes: int
) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel makes.

    Args:
        gradients: (bytes, ready_s) in the order in which the backward pass makes them.
        bucket_bytes: a bucket closes when it holds at least so much.
        first_bucket_bytes: the same for the first one.

    Source: torch.nn.parallel.DistributedDataParallel, compute_bucket_assignment_by_size.
    """
    buckets = []
    size, limit = 0, first_bucket_bytes
    ready_s = 0.0
    for gradient_bytes, at_s in gradients:
        size += gradient_bytes
        ready_s = at_s
        if size >= limit:
            buckets.append(Bucket(bytes=size, ready_s=ready_s))
            size, limit = 0, bucket_bytes
    if size:
        buckets.append(Bucket(bytes=size, ready_s=ready_s))
    return buckets


def all_reduce_s(link: Link, bytes_: float, ranks: int) -> tuple[float, float]:
    """Return the two terms of an all-reduce: seconds of latency and of moving bytes."""
    if ranks == 1:
        return 0.0, 0.0
    latency_s = (ranks - 1) * link.latency_s.value
    return latency_s, bytes_ * 2 * (ranks - 1) / ranks / link.bandwidth_bytes_per_s.value


def broadcast_s(link: Link, bytes_: float, ranks: int) -> float:
    """Return seconds of a broadcast along a binomial tree; 0 for one rank."""
    rounds = math.ceil(math.log2(ranks))
    return rounds * (link.latency_s.value + bytes_ / link.bandwidth_bytes_per_s.value)


def exposed_s(
    buckets: Sequence[Bucket], backward_s: float, link: Link, ranks: int, *, cpu_moves: bool
) -> float:
    """Return seconds by which communication makes the backward pass longer.

    Buckets are reduced one after the other, each when it is ready. Latency hides behind the
    gradients that are still computed. Where the CPU that computes also moves the bytes
    (`cpu_moves`: ranks of one node over a socket) that time does not hide: it delays the rest.
    """
    lane_s = stolen_s = 0.0
    for bucket in buckets:
        latency_s, move_s = all_reduce_s(link, bucket.bytes, ranks)
        lane_s = max(lane_s, bucket.ready_s + stolen_s) + latency_s + move_s
        stolen_s += move_s if cpu_moves else 0.0
    return max(lane_s, backward_s + stolen_s) - backward_s
