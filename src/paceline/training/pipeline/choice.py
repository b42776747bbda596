"""Chooses partitions and replicas by an estimate: the strategy ``auto``.

For P partitions and R replicas of a batch of which each of the P R ranks brings an equal part::

    microbatch      P / M of the example, which is a rank's part
    compute         the schedule, replayed with the stages' costs
    gradients       2 (R - 1) / R n bytes of a stage, after its last backward pass
    memory          a stage's parameters and the activations that are live under the schedule

`schedules.pipeline.step` puts these together, as it does for `paceline plan`. With P = 1 the
gradients are reduced while the backward pass goes on. Rates and the forward pass of the example are
measured once on all ranks together, as they compute in a step; those of rank 0 count, so that all
choose the same.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.core.errors import MemoryExceeded
from paceline.core.machine import Link, Quantity
from paceline.core.node import memory_bytes
from paceline.core.plan import MICROBATCHES_PER_STAGE
from paceline.schedules.pipeline import (
    fastest_partition,
    live_microbatches,
    one_forward_one_backward,
    pipeline_ends,
    replay,
    stage_costs,
    stage_edges,
)
from paceline.training.pipeline.costs import COPIES, NOMINAL_FLOPS_PER_S, forward_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.schedules.pipeline import LayerCosts, StagePartition
    from paceline.training.engine.ranks import Ranks
    from paceline.training.pipeline.graph import CapturedGraph

_SIDE, _ELEMENTS, _ROUNDS = 384, 1 << 18, 5


class RankRates(NamedTuple):
    """What an estimate needs to know of the machine.

    Attributes:
        slowness: seconds of computing over those of the nominal device.
        latency_s: of a message between ranks.
        bandwidth_bytes_per_s: between ranks, all of them sending.
        memory_bytes: of a rank.
    """

    slowness: float
    latency_s: float
    bandwidth_bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutEstimate:
    """What a step takes with so many partitions and replicas.

    Attributes:
        partitions, replicas: their product is the number of ranks.
        step_s: of a step without the optimizer's; infinity where it does not fit into memory.
        memory_bytes: of the stage that needs most; 0 where it does not fit.
        layers: number of layers of each stage.
    """

    partitions: int
    replicas: int
    step_s: float
    memory_bytes: int
    layers: tuple[int, ...] = ()

    def __str__(self) -> str:
        time_s = f"{1e3 * self.step_s:.3g} ms" if self.memory_bytes else "too little memory"
        return f"{self.partitions} x {self.replicas} {time_s}"


def estimate_layouts(
    costs: LayerCosts, ranks: int, rates: RankRates, microbatches: int | None = None
) -> list[LayoutEstimate]:
    """Return the estimates of all ways to divide the ranks, the fastest first.

    Args:
        costs: of the layers, for one rank's part of a batch.
        ranks: in all.
        rates: of the machine.
        microbatches: of a replica's batch; None: in proportion to the partitions.

    Raises:
        MemoryExceeded: the model fits in none of these ways.
    """
    found, problem = [], None
    for partitions in range(1, min(ranks, costs.layers) + 1):
        if ranks % partitions:
            continue
        try:
            found.append(_estimate(costs, partitions, ranks // partitions, rates, microbatches))
        except MemoryExceeded as exceeded:
            problem = exceeded
            found.append(
                LayoutEstimate(
                    partitions=partitions,
                    replicas=ranks // partitions,
                    step_s=float("inf"),
                    memory_bytes=0,
                )
            )
    found.sort(key=lambda estimate: (estimate.step_s, estimate.partitions))
    if problem is not None and not found[0].memory_bytes:
        raise problem
    return found


def _estimate(
    costs: LayerCosts, partitions: int, replicas: int, rates: RankRates, microbatches: int | None
) -> LayoutEstimate:
    count = 1
    if partitions > 1:
        count = microbatches or MICROBATCHES_PER_STAGE * partitions
    schedule = one_forward_one_backward(partitions, count)
    share = partitions / count
    scaled = replace(
        costs,
        forward_s=tuple(share * rates.slowness * value for value in costs.forward_s),
        backward_s=tuple(share * rates.slowness * value for value in costs.backward_s),
        activation_bytes=tuple(int(share * value) for value in costs.activation_bytes),
        edges=tuple(edge._replace(bytes=int(share * edge.bytes)) for edge in costs.edges),
    )
    link = Link(
        level="ranks",
        latency_s=Quantity(value=rates.latency_s, source="probe"),
        bandwidth_bytes_per_s=Quantity(value=rates.bandwidth_bytes_per_s, source="probe"),
    )

    def step_s(found: StagePartition) -> float:
        seconds = stage_costs(scaled, found.cuts)
        reduce_s = [
            _reduce_s(size, replicas, rates) for size in _gradient_bytes(scaled, found, partitions)
        ]
        if partitions == 1:
            return seconds.forward_s[0] + max(seconds.backward_s[0], reduce_s[0])
        times = replay(schedule, stage_edges(scaled.edges, found.cuts), seconds, link)
        return pipeline_ends(times, reduce_s, [0.0] * partitions).step_s

    found = fastest_partition(
        scaled,
        [rates.memory_bytes] * partitions,
        live_microbatches(schedule),
        link,
        step_s=step_s,
        is_bound=True,
    )
    bounds = itertools.pairwise([0, *found.cuts, costs.layers])
    return LayoutEstimate(
        partitions=partitions,
        replicas=replicas,
        step_s=step_s(found),
        memory_bytes=max(found.stage_bytes),
        layers=tuple(end - begin for begin, end in bounds),
    )


def _gradient_bytes(costs: LayerCosts, stages: StagePartition, count: int) -> list[int]:
    bounds = [0, *stages.cuts, costs.layers]
    kept: Sequence[int] = costs.parameter_bytes
    return [sum(kept[bounds[n] : bounds[n + 1]]) // COPIES for n in range(count)]


def _reduce_s(size_bytes: int, ranks: int, rates: RankRates) -> float:
    """Return the seconds of an all-reduce, by a ring."""
    if ranks == 1:
        return 0.0
    moved_bytes = 2 * (ranks - 1) / ranks * size_bytes
    return 2 * (ranks - 1) * rates.latency_s + moved_bytes / rates.bandwidth_bytes_per_s


def measure_rates(ranks: Ranks, device: torch.device) -> RankRates:
    """Return the rates of this machine; all ranks call this and get rank 0's.

    Cost: some milliseconds, and ten all-reduces.
    """
    matrix = torch.ones(_SIDE, _SIDE, device=device)
    flat = torch.ones(_ELEMENTS, device=device)
    compute_s = min(_seconds(lambda: matrix @ matrix, device) for _ in range(_ROUNDS))

    def reduce_s(part: torch.Tensor) -> float:
        reduce = functools.partial(dist.all_reduce, part, group=ranks.group)
        return min(_seconds(reduce, device) for _ in range(_ROUNDS))

    long_s, short_s = reduce_s(flat), reduce_s(flat[:1].clone())
    steps = 2 * (ranks.size - 1)
    moved_bytes = steps / ranks.size * flat.nbytes
    own = torch.tensor(
        [
            compute_s / (2 * _SIDE**3 / NOMINAL_FLOPS_PER_S),
            short_s / steps,
            moved_bytes / max(long_s - short_s, 1e-9),
            _memory_bytes(device, ranks),
        ],
        dtype=torch.float64,
        device=device,
    )
    dist.broadcast(own, group=ranks.group, group_src=0)
    slowness, latency_s, bandwidth, memory = own.tolist()
    return RankRates(slowness, latency_s, bandwidth, int(memory))


def measured(captured: CapturedGraph, inputs: Any, costs: LayerCosts, ranks: Ranks) -> LayerCosts:
    """Return costs with the seconds of a measured forward pass; all ranks call this.

    A backward pass takes twice as long, as where it is counted. Where rank 0 could not measure, the
    costs are as they were.

    Args:
        captured: the graph.
        inputs: an example, on the device where the model trains.
        costs: of the layers, with counted seconds.
        ranks: of which rank 0's seconds are taken.
    """
    shared = [forward_seconds(captured, inputs)]
    dist.broadcast_object_list(shared, group=ranks.group, group_src=0)
    seconds = shared[0]
    if seconds is None:
        return costs
    return replace(
        costs, forward_s=tuple(seconds), backward_s=tuple(2 * value for value in seconds)
    )


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    begin_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s


def _memory_bytes(device: torch.device, ranks: Ranks) -> int:
    """Return the memory of a rank; ranks of a group are taken to share one host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes() // ranks.size
