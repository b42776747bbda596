"""Which rank of a job runs on which of its devices: least traffic x distance.

A job's ranks exchange unequal amounts: tensor parallelism much with few, pipelines with neighbours,
data parallelism with equals of other replicas. Devices are unequally far apart. A mapping costs::

    cost = sum over pairs of ranks of traffic[i, j] x distance[device of i, device of j]

with traffic in bytes of a step and distance in seconds per byte, so that the cost is an upper bound
of the seconds of all messages one after the other. Finding the least cost is the quadratic
assignment problem, so `map_ranks` is greedy: the rank with the most traffic to those placed goes to
the device where that costs least; then pairs of ranks swap devices as long as it helps. One start
from each device keeps it from the worst local minima. Where all distances or all traffic are equal,
every mapping is as good and the ranks stay in order.
Cost: O(n^3) a start and as much a round of swaps; n starts up to 16 ranks, one beyond.
Source: T. Koopmans, M. Beckmann, Econometrica 25, 1957 (quadratic assignment); pairwise exchange:
E. Armour, G. Buffa, Management Science 9, 1963.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.scheduler.placement import NodeDevices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.scheduler.cluster import Cluster

MOST_MAPPED = 32  # ranks: some 50 ms at most, within a decision
_MANY_STARTS = 16  # ranks up to which every device is tried as the first one's


def distances(
    cluster: Cluster, devices: Sequence[NodeDevices], message_bytes: float = 1e6
) -> NDArray[np.float64]:
    """Return seconds per byte between the devices of a placement.

    Args:
        cluster: whose levels count; without levels, distance is the number of the level.
        devices: of the placement, node by node.
        message_bytes: over which the latency of a message is spread.

    Returns:
        Shape (devices, devices), symmetric, 0 on the diagonal.
    """
    switches = {node.name: node.switches for node in cluster.nodes}
    nodes = [part.node for part in devices for _ in part.devices]
    depth = max(len(path) for path in switches.values())
    count = len(nodes)
    matrix = np.zeros((count, count))
    for i in range(count):
        for j in range(i):
            level = _level(switches[nodes[i]], switches[nodes[j]], nodes[i] == nodes[j], depth)
            matrix[i, j] = matrix[j, i] = _seconds_per_byte(cluster, level, message_bytes)
    return matrix


def mapping_cost(
    traffic: NDArray[np.float64], distance: NDArray[np.float64], mapping: Sequence[int]
) -> float:
    """Return the cost of a mapping: the sum of traffic x distance over all ordered pairs.

    Args:
        traffic: bytes from rank to rank, shape (ranks, ranks).
        distance: seconds per byte from device to device, shape (devices, devices).
        mapping: index of each rank's device.
    """
    index = np.asarray(mapping)
    return float((traffic * distance[np.ix_(index, index)]).sum())


def map_ranks(traffic: NDArray[np.float64], distance: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the index of each rank's device, at little cost; see the module.

    Args:
        traffic: bytes from rank to rank, shape (ranks, ranks).
        distance: seconds per byte from device to device, shape (devices, devices); there may be
            more devices than ranks.

    Raises:
        UsageError: there are fewer devices than ranks, or a matrix is not square.
    """
    ranks, devices = len(traffic), len(distance)
    if traffic.shape != (ranks, ranks) or distance.shape != (devices, devices):
        raise UsageError(
            f"traffic of shape {traffic.shape} and distances of shape {distance.shape}",
            fix="Give square matrices",
        )
    if devices < ranks:
        raise UsageError(
            f"{ranks} ranks cannot be mapped to {devices} devices", fix="Give a device to each rank"
        )
    both = traffic + traffic.T
    np.fill_diagonal(both, 0.0)
    symmetric = (distance + distance.T) / 2
    starts = range(devices) if ranks <= _MANY_STARTS else range(1)
    # The order as it is comes first: it stays unless another one is cheaper.
    candidates = [np.arange(ranks), *(_greedy(both, symmetric, start) for start in starts)]
    best, best_cost = candidates[0], np.inf
    for candidate in candidates:
        improved = _swapped(both, symmetric, candidate)
        cost = mapping_cost(both, symmetric, improved.tolist())
        if cost < best_cost * (1 - 1e-12):
            best, best_cost = improved, cost
    return tuple(int(device) for device in best)


def rank_devices(
    cluster: Cluster, devices: Sequence[NodeDevices], traffic: NDArray[np.float64]
) -> tuple[tuple[str, int], ...]:
    """Return the node and the device of each rank of a job, at little cost; see `map_ranks`.

    Args:
        cluster: whose levels count.
        devices: of the job's placement.
        traffic: bytes from rank to rank, shape (ranks, ranks); a rank for each device.
    """
    places = [(part.node, device) for part in devices for device in part.devices]
    return tuple(places[index] for index in map_ranks(traffic, distances(cluster, devices)))


def mesh_traffic(mesh: Sequence[int]) -> NDArray[np.float64]:
    """Return what the ranks of a mesh exchange, relative to the least of all: a rule of thumb.

    Ranks that differ along one axis exchange; along each axis ten times as much as along the one
    before it: gradients once in a step, activations between stages, those of each layer.

    Args:
        mesh: sizes of the axes; ranks count the last axis first.

    Returns:
        Shape (ranks, ranks), symmetric.
    """
    places = np.array(list(np.ndindex(*mesh)))
    differ = places[:, None] != places[None]
    one_axis = differ.sum(axis=2, keepdims=True) == 1
    weights = 10.0 ** np.arange(len(mesh))
    traffic: NDArray[np.float64] = ((differ & one_axis) * weights).sum(axis=2)
    return traffic


def in_rank_order(
    cluster: Cluster, devices: Sequence[NodeDevices], mesh: Sequence[int]
) -> tuple[NodeDevices, ...]:
    """Return the devices of a placement in the order of a job's ranks; see `mesh_traffic`.

    A node whose ranks do not follow one another comes more than once. Above `MOST_MAPPED` ranks
    they stay in the order of the nodes: the cost grows with their cube.
    """
    if len(devices) == 1 or math.prod(mesh) > MOST_MAPPED:
        return tuple(devices)
    places = rank_devices(cluster, devices, mesh_traffic(mesh))
    return tuple(
        NodeDevices(node=node, devices=tuple(device for _, device in ranks))
        for node, ranks in itertools.groupby(places, key=lambda place: place[0])
    )


def _greedy(
    traffic: NDArray[np.float64], distance: NDArray[np.float64], start: int
) -> NDArray[np.int64]:
    """Return a mapping built rank by rank, the busiest rank on device `start`."""
    ranks, devices = len(traffic), len(distance)
    mapping = np.full(ranks, -1)
    free = np.ones(devices, bool)
    rank, device = int(traffic.sum(axis=1).argmax()), start
    to_placed = np.zeros(ranks)
    costs = np.zeros((ranks, devices))  # of each rank on each device, to the ranks placed so far
    for _ in range(ranks):
        mapping[rank], free[device] = device, False
        to_placed += traffic[rank]
        costs += np.outer(traffic[rank], distance[device])
        open_ranks = mapping < 0
        if not open_ranks.any():
            break
        rank = int(np.where(open_ranks, to_placed, -1.0).argmax())
        device = int(np.where(free, costs[rank], np.inf).argmin())
    return mapping


def _swapped(
    traffic: NDArray[np.float64], distance: NDArray[np.float64], mapping: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return a mapping that no exchange of two ranks, or move to a free device, makes cheaper."""
    mapping = mapping.copy()
    ranks, devices = len(traffic), len(distance)
    while True:
        best, change = -1e-12 * mapping_cost(traffic, distance, mapping.tolist()), None
        for i in range(ranks):
            near = distance[mapping[i], mapping]
            for j in range(i):
                far = distance[mapping[j], mapping]
                terms = (traffic[i] - traffic[j]) * (far - near)
                # Their own distance does not change when both exchange places.
                delta = float(terms.sum() - terms[i] - terms[j])
                if delta < best:
                    best, change = delta, (i, j, -1)
            for device in set(range(devices)) - set(mapping.tolist()):
                delta = float((traffic[i] * (distance[device, mapping] - near)).sum())
                if delta < best:
                    best, change = delta, (i, -1, device)
        if change is None:
            return mapping
        i, j, device = change
        if j >= 0:
            mapping[i], mapping[j] = mapping[j], mapping[i]
        else:
            mapping[i] = device


def _level(first: tuple[str, ...], second: tuple[str, ...], same_node: bool, depth: int) -> int:
    """Return the level at which two nodes meet; see `Shape.level`."""
    if same_node:
        return 0
    for level, (a, b) in enumerate(zip(first, second, strict=False)):
        if a == b:
            return level + 1
    return depth + 1 if depth else 1


def _seconds_per_byte(cluster: Cluster, level: int, message_bytes: float) -> float:
    if not cluster.levels:
        return float(level)
    link = cluster.levels[min(level, len(cluster.levels) - 1)]
    transfer = 1 / link.bandwidth_bytes_per_s if link.bandwidth_bytes_per_s else 0.0
    return link.latency_s / message_bytes + transfer
