"""Pipeline orders without a run: bubbles by replay, time to prove and replay, published curves.

- Bubbles of the four orders, replayed with equal stages and free transfers, beside the formulas.
- Seconds to make, check and replay the orders of 512 ranks x 64 microbatches and 5,000 x 8, and to
  cut 5,000 layers into 64 stages.
- HyPar-Flow's ResNet-1001 on 128 nodes of Stampede2 (published: 110 times one node) and 512 of
  Frontera (481 times): fill-drain over the cores of each node, a replica per node, an all-reduce
  per partition over all nodes, replayed on links and rates from data sheets. Nothing of this was
  measured here; what the replay leaves out (stragglers, the operating system, a shared network)
  makes its curve the upper one.

    python bench/pipeline_schedules.py --json
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
from harness import Report, options, run_sections
from schedules import link

from paceline.core.machine import Link
from paceline.schedules import Topology, groups_of, halving_doubling, schedule_s
from paceline.schedules.pipeline import (
    LayerCosts,
    LayerEdge,
    StageCosts,
    StageEdge,
    check_pipeline,
    fill_drain,
    interleaved,
    live_microbatches,
    one_forward_one_backward,
    partition,
    replay,
    stage_costs,
    stage_edges,
    zero_bubble,
)

MIB = 1024 * 1024
LARGE = (
    (one_forward_one_backward, 512, 64),
    (zero_bubble, 512, 64),
    (fill_drain, 5000, 8),
)
REPEATS = 5


def main():
    chosen = options(__doc__)
    report = Report("pipeline_schedules", chosen.json)
    sections = {"bubbles": bubbles, "speed": speed, "published": published}
    run_sections(sections, lambda name: sections[name](report), report)
    return report.print()


def chain(stages, size=0):
    return [StageEdge(stage, stage + 1, size) for stage in range(stages - 1)]


# --- bubbles -------------------------------------------------------------------------------------


def bubbles(report):
    """Replay each order with backwards twice as long as forwards."""
    worst = 0.0
    for ranks in (2, 4, 8, 64):
        for microbatches in (ranks, 4 * ranks):
            compute = 3.0 * microbatches
            cases = [
                (fill_drain(ranks, microbatches), 3.0 * (ranks - 1)),
                (one_forward_one_backward(ranks, microbatches), 3.0 * (ranks - 1)),
                (interleaved(ranks, 2, microbatches), 1.5 * (ranks - 1)),
                (interleaved(ranks, 4, microbatches), 0.75 * (ranks - 1)),
                (zero_bubble(ranks, microbatches), 1.0 * (ranks - 1)),
            ]
            for schedule, idle in cases:
                scale = ranks / schedule.stages
                costs = StageCosts.uniform(schedule.stages, scale, 2 * scale)
                replayed = replay(schedule, chain(schedule.stages), costs)
                share = idle / (compute + idle)
                worst = max(worst, abs(replayed.bubble_share - share))
                report.row(
                    what="bubble",
                    order=schedule.name,
                    ranks=ranks,
                    stages_per_rank=schedule.stages // ranks,
                    microbatches=microbatches,
                    replayed_share=replayed.bubble_share,
                    published_share=share,
                    most_live_microbatches=max(live_microbatches(schedule)),
                )
    report.bar("replayed bubble of every order - published formula, largest", worst, 1e-9)


# --- speed ---------------------------------------------------------------------------------------


def timed(function):
    """Return the median seconds of a call, and what it returned."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        returned = function()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds)), returned


def speed(report):
    network = link("network", 1e-5, 1e9)
    for make, stages, microbatches in LARGE:
        edges = chain(stages, 10_000)
        costs = StageCosts.uniform(stages, 1e-3, 2e-3)
        make_s, schedule = timed(lambda: make(stages, microbatches))  # noqa: B023
        check_s, _ = timed(lambda: check_pipeline(schedule, edges))  # noqa: B023
        replay_s, _ = timed(lambda: replay(schedule, edges, costs, network))  # noqa: B023
        name = f"{schedule.name}, {stages} x {microbatches}"
        actions = sum(len(order) for order in schedule.actions)
        report.row(what=name, actions=actions, make_s=make_s, check_s=check_s, replay_s=replay_s)
        report.bar(f"{name}: seconds to check", check_s, 1.0)
        report.bar(f"{name}: seconds to replay", replay_s, 2.0)
    costs = random_layers(5000)
    for what, more in (
        ("free", {}),
        ("with memory bound and devices of different speed", bounded(64)),
    ):
        seconds, cut = timed(lambda: partition(costs, 64, link=network, **more))  # noqa: B023
        report.row(what=f"partition, {what}", layers=5000, stages=64, seconds=seconds)
        report.bar(f"5,000 layers cut into 64 stages, {what}: seconds", seconds, 2.0)
        assert len(cut.cuts) == 63


def random_layers(count):
    rng = np.random.default_rng(0)
    forward_s = rng.uniform(1e-4, 1e-2, count)
    return LayerCosts(
        forward_s=tuple(forward_s.tolist()),
        backward_s=tuple((2 * forward_s).tolist()),
        parameter_bytes=tuple(rng.integers(0, MIB, count).tolist()),
        activation_bytes=tuple(rng.integers(0, MIB, count).tolist()),
        edges=tuple(
            LayerEdge(layer, tuple({layer + 1, min(layer + 3, count - 1)}), MIB)
            for layer in range(count - 1)
        ),
    )


def bounded(stages):
    return {
        "bound_bytes": [4096 * MIB] * stages,
        "live": list(range(stages, 0, -1)),
        "speeds": np.random.default_rng(1).uniform(0.5, 2.0, stages).tolist(),
    }


# --- published curves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Nodes of a published figure; rates and links from data sheets.

    Attributes:
        flops_per_s: that a core reaches in these convolutions: a fifth of its peak in float32.
    """

    name: str
    cores: int
    flops_per_s: float
    network: Link
    nodes: tuple[int, ...]
    published: dict[int, float]


INSIDE = link("shared-memory", 2e-6, 8e9, "pair")
CLUSTERS = (
    # Xeon Platinum 8160: 24 cores a socket, 2 FMA units of 16 floats, 1.4 GHz under AVX-512;
    # Omni-Path 100 Gbit/s.
    Cluster(
        name="Stampede2",
        cores=48,
        flops_per_s=0.2 * 64 * 1.4e9,
        network=link("network", 1.5e-6, 12.5e9),
        nodes=(1, 2, 4, 8, 16, 32, 64, 128),
        published={128: 110.0},
    ),
    # Xeon Platinum 8280: 28 cores a socket, 1.8 GHz under AVX-512; InfiniBand HDR-100.
    Cluster(
        name="Frontera",
        cores=56,
        flops_per_s=0.2 * 64 * 1.8e9,
        network=link("network", 1.2e-6, 12.5e9),
        nodes=(1, 8, 64, 128, 256, 512),
        published={512: 481.0},
    ),
)
# Microbatches per replica, and images in each.
BATCHES = ((48, 1), (48, 4), (192, 4))


def published(report):
    """Replay HyPar-Flow's hybrid steps: speed-up over one node at equal images per node.

    A rank all-reduces its partition's gradients when its last backward has ended; the ranks of a
    node share its link, each has an equal part of it all the time.
    """
    for cluster in CLUSTERS:
        for microbatches, images in BATCHES:
            replayed, gradients = replica_step(cluster, microbatches, images)
            backwards_s = np.array([ends[-1] for ends in replayed.end_s])
            one_s = replayed.makespan_s
            for nodes in cluster.nodes:
                step_s = float(np.max(backwards_s + all_reduce_s(cluster, nodes, gradients)))
                report.row(
                    what=f"ResNet-1001, {cluster.name}",
                    nodes=nodes,
                    partitions=cluster.cores,
                    microbatches=microbatches,
                    images=images,
                    step_s=step_s,
                    exposed_all_reduce_s=step_s - one_s,
                    bubble_share=replayed.bubble_share,
                    replayed_speed_up=nodes * one_s / step_s,
                    published_speed_up=cluster.published.get(nodes),
                )


def replica_step(cluster, microbatches, images):
    """Return the replayed step of one node, and the bytes of each partition's gradients."""
    layers = resnet_1001(cluster.flops_per_s, images)
    cut = partition(layers, cluster.cores, link=INSIDE)
    schedule = fill_drain(cluster.cores, microbatches)
    topology = Topology(hosts=groups_of(cluster.cores, cluster.cores), inside=INSIDE)
    edges = stage_edges(layers.edges, cut.cuts)
    replayed = replay(schedule, edges, stage_costs(layers, cut.cuts), topology)
    return replayed, np.add.reduceat(layers.parameter_bytes, [0, *cut.cuts])


def all_reduce_s(cluster, nodes, sizes):
    if nodes == 1:
        return np.zeros(len(sizes))
    network = cluster.network
    part = link(
        "network",
        network.latency_s.value,
        network.bandwidth_bytes_per_s.value / cluster.cores,
    )
    topology = Topology(hosts=groups_of(nodes, 1), across=part)
    return schedule_s(halving_doubling("all_reduce", nodes), topology, sizes)


def resnet_1001(flops_per_s, images):
    """Return the 333 bottleneck blocks of ResNet-1001 (version 2) for CIFAR-10, 30 million weights.

    A block is a convolution 1x1 to the inner channels, 3x3, and 1x1 to the outer ones, beside a
    connection that skips it; its sum is one tensor, which the next block gets.
    """
    macs, weights, outputs = [], [], []
    for inner, outer, side in ((16, 64, 32), (64, 128, 16), (128, 256, 8)):
        count = 2 * inner * outer + 9 * inner * inner
        for _ in range(111):
            macs.append(count * side * side)
            weights.append(count)
            outputs.append(outer * side * side)
    forward_s = 2.0 * images * np.array(macs) / flops_per_s
    return LayerCosts(
        forward_s=tuple(forward_s.tolist()),
        backward_s=tuple((2 * forward_s).tolist()),
        parameter_bytes=tuple(4 * count for count in weights),
        activation_bytes=tuple(4 * images * count for count in outputs),
        edges=tuple(
            LayerEdge(block, (block + 1,), 4 * images * outputs[block])
            for block in range(len(macs) - 1)
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
