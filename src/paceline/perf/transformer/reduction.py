"""Seconds in which replicas add up their gradients once a step: dense, sharded, or compressed.

ZeRO-3 reduces by layer, which `step` overlaps with the passes. Compressed gradients are sent as an
all-reduce of their bytes over the factor: low-rank factors are reduced like that, and of sparse
entries a host sends about twice as many as it selects, however many hosts there are. As in
`paceline.training.compression`, neither the selection nor the exchange is hidden by the backward
pass: the exchange of a bucket begins when its selection has ended, and that competes with the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.plan import Plan
    from paceline.perf.transformer.network import Network, RankGroup
    from paceline.perf.transformer.pricing import DeviceRates

# Bytes per gradient that compressing moves: three streams of 32 bits read and two written, as in
# `paceline.training.compression.estimate`.
COMPRESSION_BYTES = 20
# Bytes per gradient of what is not sent yet, in 32 bits.
RESIDUAL_BYTES = 4
# Of a stage's last backward pass, beside which gradients are reduced: the last bucket is late.
HIDDEN_SHARE = 0.9


def reduction_s(plan: Plan, parameters: float, network: Network, replicas: RankGroup) -> float:
    """Return the seconds of reducing a rank's gradients once a step; ZeRO-3 does it by layer.

    Args:
        plan: its stage of ZeRO, compression and precision of gradients.
        parameters: of the rank.
        network: between replicas.
        replicas: that reduce.
    """
    if replicas.ranks == 1 or plan.zero == 3:
        return 0.0
    wide = 4 if plan.reduce_precision == "float32" else 2
    size = wide * parameters / plan.compression
    if plan.zero:
        return network.all_gather_s(replicas, size)
    return network.all_reduce_s(replicas, size)


def exposed_reduction_s(plan: Plan, reduce_s: float, backward_s: float) -> float:
    """Return the seconds of a reduction that the last backward passes of a rank do not hide."""
    if not plan.overlap_data or plan.compression > 1:
        return reduce_s
    return max(0.0, reduce_s - HIDDEN_SHARE * backward_s)


def compression_s(plan: Plan, parameters: float, rates: DeviceRates, replicas: RankGroup) -> float:
    """Return the seconds in which a rank compresses its gradients; 0 where it has no replica."""
    if plan.compression == 1 or replicas.ranks == 1:
        return 0.0
    return COMPRESSION_BYTES * parameters / rates.bytes_per_s
