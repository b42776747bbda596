"""The critical path of a run's steps: the chain of activities, across ranks, that set their length.

It is found backwards from the rank that ended last: each node of the dependency graph was let go by
one of its edges, the last one that was over. What is on the path makes a step longer when it takes
longer; what is not on it has slack.

Source: C. Yang and B. Miller, Critical path analysis for the execution of parallel and distributed
programs (1988); D. Boehme and others, Scalable critical-path based performance analysis (2012).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.record import Record
from paceline.trace.efficiency.graph import rows_by
from paceline.trace.efficiency.timeline import phase_timeline
from paceline.trace.format.events import RECV, SEND

if TYPE_CHECKING:
    from paceline.trace.analysis import Analysis
    from paceline.trace.efficiency.graph import DependencyGraph
    from paceline.trace.efficiency.replay import Lengths, Levels

_OTHER, _TRANSFER = PHASES.index("other"), PHASES.index("transfer")


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPart(Record):
    """What one rank did on the critical path.

    Attributes:
        rank: the global rank; of a transfer, the rank that waited for it.
        phase: of the step, by a field of `Breakdown`.
        operation: of a transfer, for example ``all_reduce``; empty of computing.
        seconds: of all steps together.
    """

    rank: int
    phase: str
    operation: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalPath(Record):
    """The chain of activities that set the length of a run's steps.

    Attributes:
        seconds: its length: from the first rank's begin to the last rank's end.
        rank_changes: how often the path goes from one rank to another.
        parts: what is on it, the longest first; they add up to `seconds`.
    """

    seconds: float
    rank_changes: int
    parts: tuple[PathPart, ...]


def critical_path(
    analysis: Analysis,
    graph: DependencyGraph,
    levels: Levels,
    lengths: Lengths,
    times_ns: np.ndarray,
) -> CriticalPath:
    """Return the critical path of the graph's steps.

    Args:
        analysis: of the run.
        graph: of some of its steps.
        levels: of the graph.
        lengths: as recorded.
        times_ns: when each node happened, from `replay_ns`, shape (nodes,).
    """
    ends = graph.ends
    last = int(ends[np.argmax(times_ns[ends])])
    nodes, edges, begin = _backwards(graph, levels, lengths, times_ns, last)
    traces = _traces_of(graph, nodes)
    seconds = np.zeros((len(analysis.trace.ranks), len(PHASES)))
    chosen = graph.edges[edges]
    _add_computing(analysis, graph, chosen, seconds)
    seconds[int(_traces_of(graph, np.array([begin]))[0]), _OTHER] += times_ns[begin] / 1e9
    moved_ns = np.maximum(0, chosen["transfer_ns"] + np.minimum(0, chosen["part_ns"]))
    moved_ns = moved_ns + lengths.overhead_ns[nodes]
    parts = [
        *_computing_parts(analysis, seconds),
        *_transfer_parts(analysis, graph, traces, chosen["dependency"], moved_ns),
    ]
    parts.sort(key=lambda part: -part.seconds)
    on_ranks = traces[traces >= 0]
    return CriticalPath(
        seconds=float(times_ns[last]) / 1e9,
        rank_changes=int((on_ranks[1:] != on_ranks[:-1]).sum()),
        parts=tuple(parts),
    )


def _backwards(
    graph: DependencyGraph, levels: Levels, lengths: Lengths, times_ns: np.ndarray, last: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the nodes of the path and the edge that let each of them go, and where it begins.

    Both from the last to the first; the begin has no edge.
    """
    place = np.empty(len(levels.nodes), dtype=np.int64)
    place[levels.nodes] = np.arange(len(levels.nodes))
    sources = graph.edges["source"]
    nodes: list[int] = []
    edges: list[int] = []
    node = last
    while True:
        first, stop = levels.edge_starts[place[node] : place[node] + 2]
        if first == stop:
            return np.array(nodes, np.int64), np.array(edges, np.int64), node
        rows = levels.edges[first:stop]
        edge = int(rows[np.argmax(times_ns[sources[rows]] + lengths.edges_ns[rows])])
        nodes.append(node)
        edges.append(edge)
        node = int(sources[edge])


def _traces_of(graph: DependencyGraph, nodes: np.ndarray) -> np.ndarray:
    """Return the trace of each node; -1 of a collective's."""
    traces = np.searchsorted(graph.begins, nodes, side="right") - 1
    return np.where(nodes < graph.begins[-1], traces, -1)


def _add_computing(
    analysis: Analysis, graph: DependencyGraph, edges: np.ndarray, seconds: np.ndarray
) -> None:
    """Add the time that ranks compute on the path, by rank and phase, to `seconds`."""
    edges = edges[(edges["segment"] >= 0) & (edges["part_ns"] > 0)]
    segments = graph.segments[edges["segment"]]
    for trace_index, own in enumerate(rows_by(segments["trace"], len(seconds))):
        if len(own):
            timeline = phase_timeline(analysis, trace_index)
            begins_ns = segments["begin_ns"][own]
            spent_ns = timeline.between_ns(begins_ns, begins_ns + edges["part_ns"][own])
            seconds[trace_index] += spent_ns.sum(axis=0) / 1e9


def _computing_parts(analysis: Analysis, seconds: np.ndarray) -> list[PathPart]:
    ranks = analysis.matches.ranks
    return [
        PathPart(
            rank=int(ranks[i]), phase=PHASES[phase], operation="", seconds=float(seconds[i, phase])
        )
        for i, phase in np.argwhere(seconds > 0).tolist()
    ]


def _transfer_parts(
    analysis: Analysis,
    graph: DependencyGraph,
    traces: np.ndarray,
    dependencies: np.ndarray,
    moved_ns: np.ndarray,
) -> list[PathPart]:
    """Return the transfers on the path, and what waits took beyond them, by rank and operation."""
    names = (*analysis.matches.operations, SEND, RECV, "")
    unknown = len(names) - 1
    known = dependencies >= 0
    operations = np.full(len(traces), unknown)
    operations[known] = graph.dependencies["operation"][dependencies[known]]
    place = np.maximum(traces, 0) * len(names) + operations
    sums = np.bincount(place, moved_ns, minlength=len(analysis.trace.ranks) * len(names))
    return [
        PathPart(
            rank=int(analysis.matches.ranks[at // len(names)]),
            phase=PHASES[_TRANSFER],
            operation=names[at % len(names)],
            seconds=float(sums[at]) / 1e9,
        )
        for at in np.flatnonzero(sums > 0).tolist()
    ]
