"""Which ranks are replayed: all of them, or one for each class of ranks that do the same.

Without disturbances all ranks of a pipeline stage do the same at the same time, however many
replicas there are. A rank that is disturbed makes a class of its own, as do the other ranks of its
replica by their place in it: they wait for it within the step. Replicas with equal disturbances at
equal places are one class. All other replicas are replayed by one, in which one rank stands for all
that share a stage, or with disturbances for all at the same place of the tensor axis.

Ranks are numbered as `network.strides` places them: tensor, context, data, then pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.perf.transformer.network import strides

if TYPE_CHECKING:
    from paceline.core.plan import Mesh
    from paceline.perf.simulator.disturbances import Disturbances

Place = tuple[int, int]  # on the context and the tensor axis


@dataclass(frozen=True, slots=True)
class Actors:
    """The ranks that are replayed, numbered from 0.

    Attributes:
        ranks: global rank of each.
        counts: ranks of which each stands for.
        stages: pipeline rank of each.
        peers: for each the actors of its pipeline, by pipeline rank.
        layers: group of each that shares its layers.
        replicas: group of each that replicates its stage.
        layers_sizes: actors in each group of layers.
        replicas_sizes: actors in each group of replicas.
    """

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    stages: tuple[int, ...]
    peers: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    replicas: tuple[int, ...]
    layers_sizes: tuple[int, ...]
    replicas_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """One rank of each stage, at the same place of a replica."""

    replica: int
    place: Place
    count: int  # pipelines that it stands for


def all_ranks(mesh: Mesh) -> Actors:
    """Return every rank as an actor."""
    places = [(c, t) for c in range(mesh.context) for t in range(mesh.tensor)]
    return _actors(
        mesh,
        [_Pipeline(replica, place, 1) for replica in range(mesh.data) for place in places],
    )


def rank_classes(mesh: Mesh, disturbances: Disturbances) -> Actors:
    """Return an actor for each class of ranks."""
    marks: dict[int, list[tuple[object, ...]]] = {replica: [] for replica in range(mesh.data)}
    stride = strides(mesh)
    for rank in sorted(disturbances.ranks):
        inner = rank % stride["pipeline"]
        replica = inner // stride["data"]
        mark = (rank // stride["pipeline"], inner % stride["data"],
                disturbances.factor_of(rank), disturbances.outages_of(rank))  # fmt: skip
        marks[replica].append(mark)
    alike: dict[tuple[tuple[object, ...], ...], list[int]] = {}
    for replica, found in marks.items():
        alike.setdefault(tuple(found), []).append(replica)
    # Replicas meet at each place of the tensor axis by themselves: a disturbed rank delays its own.
    places = mesh.tensor if any(alike) else 1
    pipelines = []
    for signature, replicas in alike.items():
        if not signature:
            count = len(replicas) * mesh.context * mesh.tensor // places
            pipelines += [_Pipeline(replicas[0], (0, t), count) for t in range(places)]
            continue
        pipelines += [
            _Pipeline(replicas[0], (context, tensor), len(replicas))
            for context in range(mesh.context)
            for tensor in range(mesh.tensor)
        ]
    return _actors(mesh, pipelines)


def _actors(mesh: Mesh, pipelines: list[_Pipeline]) -> Actors:
    """Number the ranks of pipelines, pipeline by pipeline, and their groups."""
    stride = strides(mesh)
    columns: list[list[int]] = [[] for _ in range(5)]
    ranks, counts, stages, layers, replicas = columns
    peers: list[tuple[int, ...]] = []
    layers_ids: dict[tuple[object, ...], int] = {}
    replicas_ids: dict[tuple[object, ...], int] = {}
    for number, pipeline in enumerate(pipelines):
        context, tensor = pipeline.place
        base = pipeline.replica * stride["data"] + context * stride["context"] + tensor
        own = tuple(number * mesh.pipeline + stage for stage in range(mesh.pipeline))
        for stage in range(mesh.pipeline):
            ranks.append(base + stage * stride["pipeline"])
            counts.append(pipeline.count)
            stages.append(stage)
            peers.append(own)
            key: tuple[object, ...] = pipeline.replica, stage
            layers.append(layers_ids.setdefault(key, len(layers_ids)))
            key = tensor, stage
            replicas.append(replicas_ids.setdefault(key, len(replicas_ids)))
    return Actors(
        ranks=tuple(ranks),
        counts=tuple(counts),
        stages=tuple(stages),
        peers=tuple(peers),
        layers=tuple(layers),
        replicas=tuple(replicas),
        layers_sizes=_sizes(layers),
        replicas_sizes=_sizes(replicas),
    )


def _sizes(groups: list[int]) -> tuple[int, ...]:
    found = [0] * (max(groups) + 1)
    for group in groups:
        found[group] += 1
    return tuple(found)
