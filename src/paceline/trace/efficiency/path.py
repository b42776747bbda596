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
    from paceline.trace.efficiency.graph import DependencyGraph
    from paceline.trace.efficiency.replay import Lengths, Levels
    from paceline.trace.efficiency.window import StepWindow

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


class PathWalk:
    """Walks the critical path backwards, window by window, from the last one to the first."""

    def __init__(self, ranks: np.ndarray) -> None:
        """Begin at the end of the run.

        Args:
            ranks: the global rank of each trace, shape (traces,).
        """
        self._ranks = ranks
        self._computing_s = np.zeros((len(ranks), len(PHASES)))
        self._moved_s: dict[tuple[int, str], float] = {}  # by trace and operation
        self._rank_changes = 0
        self._seconds = 0.0
        self._begin_ns = 0.0  # when the path begins, as far as it is known
        self._trace: int | None = None  # and where
        self._last_rank: int | None = None  # the trace of the node after that

    def add(
        self,
        window: StepWindow,
        graph: DependencyGraph,
        levels: Levels,
        lengths: Lengths,
        times_ns: np.ndarray,
    ) -> None:
        """Walk through a window, the one before those that were walked through.

        Args:
            window: the steps.
            graph: of the window.
            levels: of the graph.
            lengths: as recorded.
            times_ns: when each node happened, from `replay_ns`, shape (nodes,).
        """
        if self._trace is None:
            self._trace = int(np.argmax(times_ns[graph.ends]))
            self._seconds = float(times_ns[graph.ends[self._trace]]) / 1e9
        last = int(graph.ends[self._trace])
        nodes, edges, begin = _backwards(graph, levels, lengths, times_ns, last)
        traces = _traces_of(graph, nodes)
        chosen = graph.edges[edges]
        _add_computing(window, graph, chosen, self._computing_s)
        moved_ns = np.maximum(0, chosen["transfer_ns"] + np.minimum(0, chosen["part_ns"]))
        moved_ns = moved_ns + lengths.overhead_ns[nodes]
        self._add_transfers(window, graph, traces, chosen["dependency"], moved_ns)
        on_ranks = traces[traces >= 0]
        if self._last_rank is not None:
            on_ranks = np.concatenate([[self._last_rank], on_ranks])
        self._rank_changes += int((on_ranks[1:] != on_ranks[:-1]).sum())
        self._last_rank = int(on_ranks[-1]) if len(on_ranks) else self._last_rank
        self._begin_ns = float(times_ns[begin])
        self._trace = int(_traces_of(graph, np.array([begin]))[0])

    def result(self) -> CriticalPath:
        """Return the path."""
        computing_s = self._computing_s.copy()
        if self._trace is not None:
            computing_s[self._trace, _OTHER] += self._begin_ns / 1e9
        parts = [
            PathPart(
                rank=int(self._ranks[i]),
                phase=PHASES[phase],
                operation="",
                seconds=float(computing_s[i, phase]),
            )
            for i, phase in np.argwhere(computing_s > 0).tolist()
        ]
        parts += [
            PathPart(
                rank=int(self._ranks[i]),
                phase=PHASES[_TRANSFER],
                operation=operation,
                seconds=seconds,
            )
            for (i, operation), seconds in self._moved_s.items()
        ]
        parts.sort(key=lambda part: (-part.seconds, part.rank, part.phase, part.operation))
        return CriticalPath(
            seconds=self._seconds, rank_changes=self._rank_changes, parts=tuple(parts)
        )

    def _add_transfers(
        self,
        window: StepWindow,
        graph: DependencyGraph,
        traces: np.ndarray,
        dependencies: np.ndarray,
        moved_ns: np.ndarray,
    ) -> None:
        """Add the transfers on the path, and what waits took beyond them."""
        names = (*window.matches.operations, SEND, RECV, "")
        known = dependencies >= 0
        operations = np.full(len(traces), len(names) - 1)
        operations[known] = graph.dependencies["operation"][dependencies[known]]
        place = np.maximum(traces, 0) * len(names) + operations
        sums = np.bincount(place, moved_ns, minlength=len(self._ranks) * len(names))
        for at in np.flatnonzero(sums > 0).tolist():
            key = (at // len(names), names[at % len(names)])
            self._moved_s[key] = self._moved_s.get(key, 0.0) + float(sums[at]) / 1e9


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
    window: StepWindow, graph: DependencyGraph, edges: np.ndarray, seconds: np.ndarray
) -> None:
    """Add the time that ranks compute on the path, by rank and phase, to `seconds`."""
    edges = edges[(edges["segment"] >= 0) & (edges["part_ns"] > 0)]
    segments = graph.segments[edges["segment"]]
    for trace_index, own in enumerate(rows_by(segments["trace"], len(seconds))):
        if len(own):
            timeline = phase_timeline(window, trace_index)
            begins_ns = segments["begin_ns"][own]
            spent_ns = timeline.between_ns(begins_ns, begins_ns + edges["part_ns"][own])
            seconds[trace_index] += spent_ns.sum(axis=0) / 1e9
