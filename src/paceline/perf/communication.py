"""The cost of collectives in data-parallel training, and how much of it the backward pass hides.

A collective's curve was measured between q ranks; t(n) is its value at n bytes. Between p ranks an
all-reduce of n bytes takes::

    seconds = t(0) * (p - 1) / (q - 1)
              + (t(n) - t(0) + n * added) * ((p - 1) / p) / ((q - 1) / q)

where `added` is the framework's cost of each byte, in addition to the collective. At p = q the
result is the measurement itself; for many ranks the second term tends to the bound of the ring, and
the first grows with the ring's length.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009; Thakur, Rabenseifner,
Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.plan import OWN_ENGINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.machine import CollectiveCost, Machine
    from paceline.core.measured_step import StepMeasurement
    from paceline.core.plan import CollectivesChoice, Plan

MODELLED = ("all_reduce", "broadcast")  # operations with a formula: what data parallelism calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        bytes: size of the gradients.
        ready_s: when the last gradient is ready, seconds from the start of the backward pass.
    """

    bytes: int
    ready_s: float


def make_buckets(
    gradients: Sequence[tuple[int, float]], *, bucket_bytes: int, first_bucket_bytes: int
) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel makes.

    Args:
        gradients: (bytes, ready_s) in the order in which the backward pass makes them.
        bucket_bytes: a bucket closes when it holds at least so many bytes.
        first_bucket_bytes: the same for the first bucket.

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


def reducing_collectives(plan: Plan) -> CollectivesChoice:
    """Return by what gradients are reduced: on one node Paceline's engine has shared memory."""
    in_memory = plan.engine in OWN_ENGINES and plan.nodes == 1 and plan.mesh.pipeline == 1
    return "paceline" if in_memory else plan.collectives


def beside_steps(machine: Machine, measured: StepMeasurement) -> Machine:
    """Return the machine with gloo's collectives as slow as they were beside the measured steps.

    Machines drift: within minutes gloo takes half as long again, or two thirds. An all-reduce that
    was timed between the same processes, in the same minute as the steps, says by how much.
    """
    ranks = measured.processes

    def is_same(cost: CollectiveCost) -> bool:
        return (cost.backend, cost.ranks, cost.hosts) == ("gloo", ranks, 1)

    probed = [cost for cost in machine.collectives if is_same(cost)]
    reduction = next((cost for cost in probed if cost.operation == "all_reduce"), None)
    if reduction is None or not measured.reduced_bytes:
        return machine
    factor = measured.reduced_s / reduction.seconds_at(measured.reduced_bytes)
    costs = tuple(cost.scaled(factor) if is_same(cost) else cost for cost in machine.collectives)
    return dataclasses.replace(machine, collectives=costs)


def all_reduce_s(
    cost: CollectiveCost, bytes_: float, ranks: int, added_s_per_byte: float = 0.0
) -> tuple[float, float]:
    """Return the two terms of an all-reduce: seconds of latency and of moving bytes."""
    if ranks == 1:
        return 0.0, 0.0
    latency_s = cost.seconds_at(0)
    move_s = cost.seconds_at(bytes_) - latency_s + bytes_ * added_s_per_byte
    return latency_s * (ranks - 1) / (cost.ranks - 1), move_s * _ring_share(cost, ranks)


def _ring_share(cost: CollectiveCost, ranks: int) -> float:
    """Return bytes that a rank sends in a ring of `ranks`, over those of the measured ring."""
    return ((ranks - 1) / ranks) / ((cost.ranks - 1) / cost.ranks)


def broadcast_s(
    cost: CollectiveCost, bytes_: float, ranks: int, latency_s: float | None = None
) -> float:
    """Return seconds of a broadcast along a binomial tree; 0 for one rank.

    Args:
        cost: measured cost of the bare collective.
        bytes_: bytes that the root sends to every rank.
        ranks: number of ranks that take part.
        latency_s: seconds of an empty broadcast, if a framework's takes longer than the bare one;
            None = those of `cost`.
    """
    bare_s = cost.seconds_at(0)
    rounds = math.ceil(math.log2(ranks)) / math.ceil(math.log2(cost.ranks))
    empty_s = bare_s if latency_s is None else latency_s
    return rounds * (empty_s + cost.seconds_at(bytes_) - bare_s)


def collective_s(cost: CollectiveCost, bytes_: float, ranks: int) -> float:
    """Return seconds of the operation of a cost, one of `MODELLED`, between some ranks."""
    if cost.operation == "all_reduce":
        return sum(all_reduce_s(cost, bytes_, ranks))
    return broadcast_s(cost, bytes_, ranks)


def exposed_s(
    buckets: Sequence[Bucket],
    backward_s: float,
    cost: CollectiveCost,
    ranks: int,
    *,
    added_s_per_byte: float = 0.0,
    cpu_moves: bool,
    per_core: float = 1.0,
) -> float:
    """Return seconds by which communication makes the backward pass longer.

    Buckets are reduced one after the other, each when it is ready. The computation of later
    gradients hides latency. It does not hide the time for which the CPU that computes also moves
    bytes (`cpu_moves`: CPU ranks that share a node): that delays the backward pass. It is the
    CPU time of a call where the probe measured that, or else all but the latency: threads of gloo
    wait for each other for milliseconds, in which the backward pass goes on. `per_core` ranks share
    a core.
    """
    lane_s = stolen_s = 0.0
    for bucket in buckets:
        latency_s, move_s = all_reduce_s(cost, bucket.bytes, ranks, added_s_per_byte)
        cpu_s = cost.cpu_seconds_at(bucket.bytes) if cpu_moves else None
        if cpu_s is not None:
            move_s = cpu_s * _ring_share(cost, ranks) + bucket.bytes * added_s_per_byte
            move_s *= per_core
        lane_s = max(lane_s, bucket.ready_s + stolen_s) + latency_s + move_s
        stolen_s += move_s if cpu_moves else 0.0
    return max(lane_s, backward_s + stolen_s) - backward_s
