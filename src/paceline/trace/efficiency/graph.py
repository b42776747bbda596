r"""The dependencies of a run as a graph, which tells when everything happens if parts take less.

A rank's main thread computes in *segments*, and waits between them::

    rank 0   begin --segment--> wait --segment--> wait --segment--> end
                        \            ^
                    enters           | data there
                          v          |
                        collective (when its last rank has entered)
                          ^
    rank 1   begin --segment--> wait ...

A node is a wait's end, a collective's last entry, or the begin or end of a rank's window. An edge
leads to it from where its time follows; it takes a part of a segment (compute), or the transfer of
data. A node happens when the last of its edges is over, and the overhead of its wait after that:
with the recorded lengths, when it did in the trace. With others, for example transfers of 0, the
same graph replays what would have been, as Dimemas does on an ideal network.

Source: J. Labarta and others, DiP: a parallel program development environment (1996).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.efficiency.dependencies import wait_dependencies
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from paceline.trace.analysis import Analysis

NO_SEGMENT = -1

# `begin_ns` to `end_ns` the rank computes; `period` is the step of the wait at its end, counted
# from the first of the window. The segment with the number s of trace t leads to node s + t + 1.
SEGMENT = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("trace", "<i4"), ("period", "<i4")])

# An edge takes `part_ns` of its segment from that segment's begin (below 0: from before the window,
# which no scenario changes), then `transfer_ns`.
EDGE = np.dtype(
    [
        ("source", "<i8"),
        ("target", "<i8"),
        ("segment", "<i8"),
        ("part_ns", "<i8"),
        ("transfer_ns", "<i8"),
        ("dependency", "<i8"),  # row of the dependency that it is for; -1 for a program's order
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class DependencyGraph:
    """Who waited for what in some steps of a run.

    Nodes are numbered: each trace's begin, waits and end, in the order of traces; then collectives.

    Attributes:
        segments: array of `SEGMENT`, by trace, in order of time.
        edges: array of `EDGE`; first those of the segments, in their order.
        dependencies: array of `DEPENDENCY`, of all waits of the run.
        recorded_ns: when each node happened, shape (nodes,).
        overhead_ns: what follows a node's last edge in its wait, shape (nodes,).
        begins: node of each trace's begin, shape (traces + 1,); the last is the first collective's.
        first_waits: row of the first wait of the window in each trace's waits, shape (traces,).
        first_step, stop_step: the steps of the window.
    """

    segments: np.ndarray
    edges: np.ndarray
    dependencies: np.ndarray
    recorded_ns: np.ndarray
    overhead_ns: np.ndarray
    begins: np.ndarray
    first_waits: np.ndarray
    first_step: int
    stop_step: int

    @property
    def ends(self) -> np.ndarray:
        """Node of each trace's end, shape (traces,)."""
        return np.asarray(self.begins[1:] - 1)

    def node_of(self, traces: np.ndarray, waits: np.ndarray) -> np.ndarray:
        """Return the nodes of waits, given by trace and row; -1 outside the window."""
        nodes = self.begins[traces] + 1 + waits - self.first_waits[traces]
        inside = (nodes > self.begins[traces]) & (nodes < self.begins[traces + 1] - 1)
        return np.where(inside, nodes, -1)

    @property
    def last_begin_ns(self) -> int:
        """From the first rank's begin of the window to the last rank's."""
        begins = self.recorded_ns[self.begins[:-1]]
        return int(begins.max() - begins.min())

    @property
    def wall_ns(self) -> int:
        """From the first rank's begin of the window to the last rank's end."""
        ends, begins = self.recorded_ns[self.ends], self.recorded_ns[self.begins[:-1]]
        return int(ends.max() - begins.min())


def dependency_graph(analysis: Analysis, first_step: int, stop_step: int) -> DependencyGraph:
    """Return the graph of steps `first_step` to `stop_step` - 1, which all ranks completed."""
    places = [
        _RankWindow(analysis, trace_index, first_step, stop_step)
        for trace_index in range(len(analysis.trace.ranks))
    ]
    counts = np.array([len(place.nodes_ns) for place in places])
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    segments = np.concatenate([place.segments() for place in places])
    dependencies = wait_dependencies(analysis)
    first_waits = np.array([place.first_wait for place in places], dtype=np.int64)
    nodes_ns = np.concatenate([place.nodes_ns for place in places])
    bare = DependencyGraph(
        segments=segments,
        edges=np.zeros(0, EDGE),
        dependencies=dependencies,
        recorded_ns=nodes_ns,
        overhead_ns=np.zeros(0, np.int64),
        begins=begins,
        first_waits=first_waits,
        first_step=first_step,
        stop_step=stop_step,
    )
    rows = np.flatnonzero(bare.node_of(dependencies["trace"], dependencies["wait"]) >= 0)
    instances, collectives = np.unique(
        dependencies["instance"][rows[dependencies["whole"][rows]]], return_inverse=True
    )
    recorded_ns = np.concatenate([nodes_ns, analysis.matches.instances["last_ns"][instances]])
    edges = np.concatenate(
        [
            _program_edges(segments),
            _entries(analysis, places, begins, instances),
            _to_waits(bare, places, rows, collectives),
        ]
    )
    return DependencyGraph(
        segments=segments,
        edges=edges,
        dependencies=dependencies,
        recorded_ns=recorded_ns,
        overhead_ns=_overhead_ns(edges, recorded_ns, int(begins[-1])),
        begins=begins,
        first_waits=first_waits,
        first_step=first_step,
        stop_step=stop_step,
    )


class _RankWindow:
    """Begin, waits and end of the steps of one rank; places times in its segments."""

    def __init__(self, analysis: Analysis, trace_index: int, first: int, stop: int) -> None:
        rank, clock = analysis.trace.ranks[trace_index], analysis.trace.clocks[trace_index]
        self.trace_index = trace_index
        steps = rank.events_of(Kind.STEP)
        inside = (steps["step"] >= first) & (steps["step"] < stop)
        begin_ns = clock.to_run_ns(int(steps["begin_ns"][inside].min()))
        end_ns = clock.to_run_ns(int(steps["end_ns"][inside].max()))
        waits = analysis.waits[trace_index]
        chosen = np.flatnonzero((waits["begin_ns"] >= begin_ns) & (waits["end_ns"] <= end_ns))
        self.first_wait = int(chosen[0]) if len(chosen) else 0
        waits = waits[chosen]
        of_steps = rank.events_of(Kind.WAIT)["step"][chosen].astype(np.int64)
        self.periods = np.concatenate([np.clip(of_steps - first, 0, stop - first), [stop - first]])
        ends_ns = np.maximum.accumulate(waits["end_ns"])
        self.nodes_ns = np.concatenate([[begin_ns], ends_ns, [end_ns]])
        self.begins_ns = self.nodes_ns[:-1]
        self.ends_ns = np.maximum(np.concatenate([waits["begin_ns"], [end_ns]]), self.begins_ns)

    def segments(self) -> np.ndarray:
        """Return the rank's segments, an array of `SEGMENT`."""
        found = np.zeros(len(self.begins_ns), SEGMENT)
        found["begin_ns"], found["end_ns"] = self.begins_ns, self.ends_ns
        found["trace"], found["period"] = self.trace_index, self.periods
        return found

    def place(self, times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the segment in which each time lies, from 0, and the part of it before that time.

        A time within a wait is at the wait's begin, a time after the window in its last segment.
        """
        at = np.searchsorted(self.begins_ns[1:], times_ns, side="right")
        limit_ns = np.where(at < len(self.begins_ns) - 1, self.ends_ns[at], times_ns)
        return at, np.minimum(times_ns, limit_ns) - self.begins_ns[at]


def _program_edges(segments: np.ndarray) -> np.ndarray:
    edges = np.zeros(len(segments), EDGE)
    numbers = np.arange(len(segments))
    edges["target"] = numbers + segments["trace"] + 1
    edges["source"] = edges["target"] - 1
    edges["segment"] = numbers
    edges["part_ns"] = segments["end_ns"] - segments["begin_ns"]
    edges["dependency"] = -1
    return edges


def _entries(
    analysis: Analysis, places: list[_RankWindow], begins: np.ndarray, instances: np.ndarray
) -> np.ndarray:
    """Return the edges from ranks to the collectives that they enter."""
    matches = analysis.matches
    number = np.full(len(matches.instances), -1)
    number[instances] = np.arange(len(instances))
    found = [np.zeros(0, EDGE)]
    for place in places:
        calls = matches.calls[matches.calls_of(place.trace_index)]
        calls = calls[number[calls["instance"]] >= 0]
        edges = _from_ranks(place, begins, calls["enter_ns"])
        edges["target"] = begins[-1] + number[calls["instance"]]
        edges["dependency"] = -1
        found.append(edges)
    return np.concatenate(found)


def _from_ranks(place: _RankWindow, begins: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    at, part_ns = place.place(times_ns)
    edges = np.zeros(len(times_ns), EDGE)
    edges["source"] = begins[place.trace_index] + at
    edges["segment"] = begins[place.trace_index] - place.trace_index + at
    edges["part_ns"] = part_ns
    return edges


def _to_waits(
    graph: DependencyGraph,
    places: list[_RankWindow],
    rows: np.ndarray,
    collectives: np.ndarray,
) -> np.ndarray:
    """Return the edges to waits from collectives, or from the one rank on which a wait depends.

    How long data of one rank were on their way is known only where the receiver was there first;
    else the edge takes what the receiver still waited.
    """
    dependencies = graph.dependencies[rows]
    edges = np.zeros(len(rows), EDGE)
    edges["target"] = graph.node_of(dependencies["trace"], dependencies["wait"])
    edges["dependency"] = rows
    edges["segment"] = NO_SEGMENT
    whole = dependencies["whole"]
    edges["source"][whole] = graph.begins[-1] + collectives
    alone = np.flatnonzero(~whole)
    for place, own in zip(places, rows_by(dependencies["late"][alone], len(places)), strict=True):
        from_rank = _from_ranks(place, graph.begins, dependencies["entered_ns"][alone[own]])
        for field in ("source", "segment", "part_ns"):
            edges[field][alone[own]] = from_rank[field]
    both_ns = np.maximum(dependencies["entered_ns"], dependencies["own_ns"])
    edges["transfer_ns"] = np.maximum(0, dependencies["complete_ns"] - both_ns)
    return edges


def rows_by(owners: np.ndarray, count: int) -> list[np.ndarray]:
    """Return for each owner from 0 to `count` - 1 the rows that it has in `owners`."""
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.searchsorted(owners[order], np.arange(1, count)))


def _overhead_ns(edges: np.ndarray, recorded_ns: np.ndarray, first_collective: int) -> np.ndarray:
    """Return what follows the last edge of each wait; none precedes it but for a clock's error."""
    latest_ns = np.full(len(recorded_ns), np.iinfo(np.int64).min)
    over_ns = recorded_ns[edges["source"]] + edges["part_ns"] + edges["transfer_ns"]
    np.maximum.at(latest_ns, edges["target"], over_ns)
    found = np.maximum(0, recorded_ns - latest_ns)
    found[latest_ns == np.iinfo(np.int64).min] = 0
    found[first_collective:] = 0
    return np.asarray(found)
