"""Replays a dependency graph: when each node happens, for several scenarios at once.

Nodes are taken in levels: those of one level depend on earlier levels alone, so each level is a few
operations on arrays, however many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.efficiency.graph import ranges

if TYPE_CHECKING:
    from paceline.trace.efficiency.graph import DependencyGraph


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """The order in which nodes can be taken.

    Attributes:
        level: of each node, shape (nodes,).
        nodes: by level, shape (nodes,).
        starts: where each level begins in `nodes`, shape (levels + 1,).
        edges: rows of the graph's edges, by level and target, shape (edges,).
        edge_starts: where each node's edges begin in `edges`, in the order of `nodes`, shape (nodes
            + 1,).
        cut_count: number of edges that were left out, because clocks or lost events made a cycle.
    """

    level: np.ndarray
    nodes: np.ndarray
    starts: np.ndarray
    edges: np.ndarray
    edge_starts: np.ndarray
    cut_count: int


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """What edges and waits take in one scenario, nanoseconds.

    Attributes:
        edges_ns: of each edge, shape (edges,).
        overhead_ns: of each node, shape (nodes,).
    """

    edges_ns: np.ndarray
    overhead_ns: np.ndarray


def order_levels(graph: DependencyGraph) -> Levels:
    """Return the levels of a graph.

    A cycle is cut at its first recorded node, which then depends on its own rank alone.
    Source: A. Kahn, Topological sorting of large networks (1962).
    """
    edges, count = graph.edges, len(graph.recorded_ns)
    by_source = np.argsort(edges["source"], kind="stable")
    out_starts = np.searchsorted(edges["source"][by_source], np.arange(count + 1))
    open_edges = np.bincount(edges["target"], minlength=count)
    kept = np.ones(len(edges), dtype=bool)
    level = np.full(count, -1, dtype=np.int64)
    ready = np.flatnonzero(open_edges == 0)
    number = 0
    while True:
        while len(ready):
            level[ready] = number
            number += 1
            first, last = out_starts[ready], out_starts[ready + 1]
            leaving = by_source[ranges(first, last)]
            targets = edges["target"][leaving[kept[leaving]]]
            np.subtract.at(open_edges, targets, 1)
            reached = np.unique(targets)
            ready = reached[open_edges[reached] == 0]
        left = np.flatnonzero(level < 0)
        if not len(left):
            break
        ready = _cut(graph, left, level, kept, open_edges)
    return _sorted_by_level(graph, level, kept)


def _cut(
    graph: DependencyGraph,
    left: np.ndarray,
    level: np.ndarray,
    kept: np.ndarray,
    open_edges: np.ndarray,
) -> np.ndarray:
    """Cut the edges to the first node of a cycle from what has no level; return that node."""
    edges = graph.edges
    first = left[np.argmin(graph.recorded_ns[left])]
    waited = (edges["target"] == first) & kept & (level[edges["source"]] < 0)
    kept[waited] = False
    open_edges[first] = 0
    return np.array([first])


def _sorted_by_level(graph: DependencyGraph, level: np.ndarray, kept: np.ndarray) -> Levels:
    nodes = np.argsort(level, kind="stable")
    place = np.empty(len(nodes), dtype=np.int64)
    place[nodes] = np.arange(len(nodes))
    rows = np.flatnonzero(kept)
    targets = place[graph.edges["target"][rows]]
    order = np.argsort(targets, kind="stable")
    levels = int(level.max(initial=-1)) + 1
    return Levels(
        level=level,
        nodes=nodes,
        starts=np.searchsorted(level[nodes], np.arange(levels + 1)),
        edges=rows[order],
        edge_starts=np.searchsorted(targets[order], np.arange(len(nodes) + 1)),
        cut_count=int((~kept).sum()),
    )


def replay_ns(
    graph: DependencyGraph,
    levels: Levels,
    scenarios: list[Lengths],
    begins_ns: np.ndarray,
    origin_ns: int,
) -> np.ndarray:
    """Return when each node happens in each scenario, shape (scenarios, nodes), nanoseconds.

    Args:
        graph: of some steps.
        levels: of the graph.
        scenarios: what edges and waits take.
        begins_ns: when ranks begin these steps in each scenario, shape (scenarios, traces).
        origin_ns: times are counted from this one of the run.
    """
    times = np.repeat((graph.recorded_ns - origin_ns)[None].astype(np.float64), len(scenarios), 0)
    times[:, graph.begins[:-1]] = begins_ns
    lengths = np.stack([scenario.edges_ns[levels.edges] for scenario in scenarios])
    overheads = np.stack([scenario.overhead_ns for scenario in scenarios])
    sources = graph.edges["source"][levels.edges]
    starts, edge_starts = levels.starts.tolist(), levels.edge_starts
    for first, last in pairwise(starts):
        nodes, bounds = levels.nodes[first:last], edge_starts[first : last + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        if begin == end:
            continue
        has_edges = bounds[1:] > bounds[:-1]
        nodes, at = nodes[has_edges], bounds[:-1][has_edges] - begin
        over = times[:, sources[begin:end]] + lengths[:, begin:end]
        times[:, nodes] = np.maximum.reduceat(over, at, axis=1) + overheads[:, nodes]
    return times
