"""Bytes that a rank sends in a step, by level of link: inside a node, and between nodes.

A ring of p ranks, k of them on each node, crosses to another node once for every k ranks: so of
what the ranks send, the part 1 / k goes over the network. An all-reduce of n bytes sends 2 n (p -
1) / p from each rank, a gather or a scatter half of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.perf.transformer.layer import ACTIVATION_BYTES, layer_work
from paceline.perf.transformer.memory import rank_parameters, stage_layer_counts
from paceline.perf.transformer.network import NETWORK, strides

if TYPE_CHECKING:
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.network import Network, RankGroup


def link_bytes(
    model: Architecture, plan: Plan, microbatch: float, network: Network, inside: str
) -> dict[str, int]:
    """Return the bytes that the busiest rank sends in a step, by level of link.

    Args:
        model: its architecture.
        plan: how it is spread.
        microbatch: samples of one.
        network: on which its ranks lie.
        inside: name of the level of links between devices of a node.
    """
    mesh, count = plan.mesh, plan.microbatch_count
    stride = strides(mesh)
    layers = stage_layer_counts(model, plan)
    per_rank = max(sum(layers[rank :: mesh.pipeline]) for rank in range(mesh.pipeline))
    work = layer_work(model, plan, microbatch)
    passes = 6 if work.recompute_all else 4
    total = {inside: 0.0, NETWORK: 0.0}

    def ring(group: RankGroup, size_bytes: float) -> None:
        sent = size_bytes * (group.ranks - 1) / group.ranks
        across = 1 / group.per_node if group.nodes > 1 else 0.0
        total[NETWORK] += sent * across
        total[inside] += sent * (1 - across)

    ring(network.group(mesh.tensor, 1), 2 * passes * per_rank * count * work.exchange_bytes)
    context = network.group(mesh.context, stride["context"])
    if context.ranks > 1:
        ring(context, 3 * per_rank * count * work.ring_bytes * context.ranks / (context.ranks - 1))
    replicas = network.group(mesh.data * mesh.context, mesh.tensor)
    parameters = max(rank_parameters(model, plan))
    ring(replicas, _replica_bytes(plan, parameters))
    if mesh.pipeline > 1:
        first, following = 0, stride["pipeline"] // network.node_devices
        level = inside if first == following else NETWORK
        sent = 2 * count * plan.stages_per_rank * work.exchange_bytes / mesh.tensor
        total[level] += sent
    return {level: round(size) for level, size in total.items() if size}


def _replica_bytes(plan: Plan, parameters: float) -> float:
    """Return bytes of gathers and scatters between replicas, counted as results."""
    gradient = 4 if plan.reduce_precision == "float32" or plan.precision == "float32" else 2
    if plan.zero == 3:
        return plan.microbatch_count * parameters * (2 * ACTIVATION_BYTES + gradient)
    gathered = ACTIVATION_BYTES if plan.zero else gradient
    return parameters * (gradient + gathered) / plan.compression
