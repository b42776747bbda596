r"""The dependencies of a run as a graph, which tells when everything happens if parts take less.

A rank's main thread computes in *segments*, and waits between them::

    rank 0   begin --segment--> wait --segment--> wait --segment--> end
                        \            ^
                    enters           | data there
                          v          |
                        collective (when its last rank has entered)
                          ^
    rank 1   begin --segment--> wait ...

A node is a wait's end, a collective's last entry, or the begin or end of a rank's step. An edge
leads to it from where its time follows; it takes a part of a segment (compute), or the transfer of
data. A node happens when the last of its edges is over, and the overhead of its wait after that:
with the recorded lengths, when it did in the trace. With others, for example transfers of 0, the
same graph replays what would have been, as Dimemas does on an ideal network.

An edge to a wait comes from the rank's step with the same number. What that rank did in an earlier
step happens before the begin of this one, and what it did in a later one after its end, as long as
recorded: so steps can be replayed one after the other, and a rank's begin and end is all that goes
from one to the next.

Source: J. Labarta and others, DiP: a parallel program development environment (1996).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.efficiency.dependencies import wait_dependencies
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from paceline.trace.efficiency.window import StepWindow

NO_SEGMENT = -1

# `begin_ns` to `end_ns` the rank computes; `period` is the step of the wait at its end, counted
# from the first of the window. The segment with the number s of trace t leads to node s + t + 1.
SEGMENT = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("trace", "<i4"), ("period", "<i4")])

# An edge takes `part_ns` of its segment from that segment's begin (below 0: from before the step,
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

    Nodes are numbered: each trace's begin, waits and ends of steps, in the order of traces; then
    collectives, once for each step in which ranks wait for them.

    Attributes:
        segments: array of `SEGMENT`, by trace, in order of time.
        edges: array of `EDGE`; first those of the segments, in their order.
        dependencies: array of `DEPENDENCY`, of all waits of the run.
        recorded_ns: when each node happened, shape (nodes,).
        overhead_ns: what follows a node's last edge in its wait, shape (nodes,).
        begins: node of each trace's begin, shape (traces + 1,); the last is the first collective's.
        wait_nodes: node of each wait, of all traces one after the other; -1 outside the window.
        wait_steps: the step of each wait; -1 outside the steps that are measured.
        wait_starts: where each trace's waits begin in these, shape (traces + 1,).
        step_ends_ns: when each trace ended each step, shape (traces, steps of the window).
        first_step, stop_step: the steps of the window.
    """

    segments: np.ndarray
    edges: np.ndarray
    dependencies: np.ndarray
    recorded_ns: np.ndarray
    overhead_ns: np.ndarray
    begins: np.ndarray
    wait_nodes: np.ndarray
    wait_steps: np.ndarray
    wait_starts: np.ndarray
    step_ends_ns: np.ndarray
    first_step: int
    stop_step: int

    @property
    def ends(self) -> np.ndarray:
        """Node of each trace's end, shape (traces,)."""
        return np.asarray(self.begins[1:] - 1)

    def node_of(self, traces: np.ndarray, waits: np.ndarray) -> np.ndarray:
        """Return the nodes of waits, given by trace and row; -1 outside the window."""
        return np.asarray(self.wait_nodes[self.wait_starts[traces] + waits])

    def periods_of(self, nodes: np.ndarray, traces: np.ndarray) -> np.ndarray:
        """Return the step of each node of a trace but its begin, counted from the first one."""
        return np.asarray(self.segments["period"][nodes - traces - 1].astype(np.int64))


def dependency_graph(window: StepWindow) -> DependencyGraph:
    """Return the graph of a window's steps, which all ranks completed."""
    places = [_RankSteps(window, trace_index) for trace_index in range(len(window.trace.ranks))]
    counts = np.array([len(place.nodes_ns) for place in places])
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    segments = np.concatenate([place.segments() for place in places])
    dependencies = wait_dependencies(window.matches, window.waits, window.awaited)
    nodes_ns = np.concatenate([place.nodes_ns for place in places])
    wait_nodes = [
        np.where(place.wait_nodes >= 0, place.wait_nodes + begin, -1)
        for place, begin in zip(places, begins[:-1].tolist(), strict=True)
    ]
    bare = DependencyGraph(
        segments=segments,
        edges=np.zeros(0, EDGE),
        dependencies=dependencies,
        recorded_ns=nodes_ns,
        overhead_ns=np.zeros(0, np.int64),
        begins=begins,
        wait_nodes=np.concatenate(wait_nodes),
        wait_steps=np.concatenate([place.wait_steps for place in places]),
        wait_starts=np.concatenate([[0], np.cumsum([len(own) for own in wait_nodes])]),
        step_ends_ns=np.array([place.ends_of_all_ns for place in places]),
        first_step=window.first_step,
        stop_step=window.stop_step,
    )
    targets = bare.node_of(dependencies["trace"], dependencies["wait"])
    rows = np.flatnonzero(targets >= 0)
    waiting = dependencies[rows]
    periods = bare.periods_of(targets[rows], waiting["trace"].astype(np.int64))
    whole = waiting["whole"]
    keys = waiting["instance"][whole] * (window.stop_step - window.first_step) + periods[whole]
    keys, collectives = np.unique(keys, return_inverse=True)
    instances, of_steps = np.divmod(keys, window.stop_step - window.first_step)
    recorded_ns = np.concatenate([nodes_ns, window.matches.instances["last_ns"][instances]])
    edges = np.concatenate(
        [
            _program_edges(segments),
            _entries(window, places, begins, instances, of_steps),
            _to_waits(bare, places, rows, targets[rows], periods, collectives),
        ]
    )
    return dataclasses.replace(
        bare,
        edges=edges,
        recorded_ns=recorded_ns,
        overhead_ns=_overhead_ns(edges, recorded_ns, int(begins[-1])),
    )


class _RankSteps:
    """Begin, waits and ends of the steps of one rank; places times in its segments.

    Attributes:
        nodes_ns: when its begin, its waits' ends and its steps' ends were, shape (nodes,).
        wait_nodes: number of each wait's node among these; -1 outside the window.
        wait_steps: the step of each wait; -1 outside the steps that are measured, or across steps.
        ends_of_all_ns: when it ended each step of the window, those that it lost included.
    """

    def __init__(self, window: StepWindow, trace_index: int) -> None:
        rank, clock = window.trace.ranks[trace_index], window.trace.clocks[trace_index]
        waits = window.waits[trace_index]
        self.trace_index = trace_index
        marks = rank.events_of(Kind.STEP)
        marks = marks[(marks["step"] >= window.run_first) & (marks["step"] < window.run_stop)]
        numbers = marks["step"].astype(np.int64)
        ends_ns = np.maximum.accumulate(clock.to_run_ns(marks["end_ns"]))
        begins_ns = np.concatenate([clock.to_run_ns(marks["begin_ns"][:1]), ends_ns[:-1]])
        steps = rank.events_of(Kind.WAIT)["step"].astype(np.int64)
        self.wait_steps = np.where(_within(waits, steps, numbers, begins_ns, ends_ns), steps, -1)
        own = (numbers >= window.first_step) & (numbers < window.stop_step)
        self._periods, ends_ns = numbers[own] - window.first_step, ends_ns[own]
        begin_ns, count = int(begins_ns[own][0]), len(ends_ns)
        all_periods = np.arange(window.stop_step - window.first_step)
        later = np.searchsorted(self._periods, all_periods, side="left")
        self.ends_of_all_ns = ends_ns[np.minimum(later, count - 1)]

        chosen = np.flatnonzero(
            (self.wait_steps >= window.first_step) & (self.wait_steps < window.stop_step)
        )
        step_of = np.searchsorted(self._periods, self.wait_steps[chosen] - window.first_step)
        at_waits = 1 + np.arange(len(chosen)) + step_of
        waits_before = np.searchsorted(step_of, np.arange(count), side="right")
        at_ends = 1 + waits_before + np.arange(count)
        nodes_ns = np.zeros(1 + len(chosen) + count, dtype=np.int64)
        nodes_ns[0], nodes_ns[at_ends] = begin_ns, ends_ns
        entered_ns = nodes_ns.copy()
        nodes_ns[at_waits] = waits["end_ns"][chosen]
        entered_ns[at_waits] = waits["begin_ns"][chosen]
        self.nodes_ns = np.maximum.accumulate(nodes_ns)
        self.begins_ns = self.nodes_ns[:-1]
        self.ends_ns = np.maximum(entered_ns[1:], self.begins_ns)
        self._first = np.concatenate([[0], at_ends[:-1]])  # segment of each step
        self._last = at_ends - 1
        self._segment_steps = np.repeat(np.arange(count), np.diff(at_ends, prepend=0))
        self.wait_nodes = np.full(len(waits), -1)
        self.wait_nodes[chosen] = at_waits

    def segments(self) -> np.ndarray:
        """Return the rank's segments, an array of `SEGMENT`."""
        found = np.zeros(len(self.begins_ns), SEGMENT)
        found["begin_ns"], found["end_ns"] = self.begins_ns, self.ends_ns
        found["trace"], found["period"] = self.trace_index, self._periods[self._segment_steps]
        return found

    def place(self, times_ns: np.ndarray, periods: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the segment in which each time lies, from 0, and the part of it before that time.

        A time within a wait is at the wait's begin, one after its step in the step's last segment.

        Args:
            times_ns: on the run's clock, shape (times,).
            periods: the step in which each is placed, counted from the first one.
        """
        step = np.minimum(np.searchsorted(self._periods, periods), len(self._periods) - 1)
        first, last = self._first[step], self._last[step]
        at = np.searchsorted(self.begins_ns, times_ns, side="right") - 1
        at = np.clip(at, first, last)
        limit_ns = np.where(at < last, self.ends_ns[at], times_ns)
        return at, np.minimum(times_ns, limit_ns) - self.begins_ns[at]


def _within(
    waits: np.ndarray,
    steps: np.ndarray,
    numbers: np.ndarray,
    begins_ns: np.ndarray,
    ends_ns: np.ndarray,
) -> np.ndarray:
    """Return which waits are whole in their steps, given by number, begin and end."""
    if not len(numbers):
        return np.zeros(len(waits), dtype=bool)
    at = np.minimum(np.searchsorted(numbers, steps), len(numbers) - 1)
    known = numbers[at] == steps
    return np.asarray(
        known & (waits["begin_ns"] >= begins_ns[at]) & (waits["end_ns"] <= ends_ns[at])
    )


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
    window: StepWindow,
    places: list[_RankSteps],
    begins: np.ndarray,
    instances: np.ndarray,
    periods: np.ndarray,
) -> np.ndarray:
    """Return the edges from ranks to the collectives that they enter.

    Args:
        window: of the graph.
        places: of its ranks.
        begins: node of each trace's begin.
        instances: of each node of a collective, in order.
        periods: the step of each of these nodes.
    """
    matches = window.matches
    wanted = np.zeros(len(matches.instances), dtype=bool)
    wanted[instances] = True
    found = [np.zeros(0, EDGE)]
    for place in places:
        calls = matches.calls[matches.calls_of(place.trace_index)]
        calls = calls[wanted[calls["instance"]]]
        first = np.searchsorted(instances, calls["instance"], side="left")
        stop = np.searchsorted(instances, calls["instance"], side="right")
        collectives = ranges(first, stop)
        entered_ns = np.repeat(calls["enter_ns"], stop - first)
        edges = _from_ranks(place, begins, entered_ns, periods[collectives])
        edges["target"] = begins[-1] + collectives
        edges["dependency"] = -1
        found.append(edges)
    return np.concatenate(found)


def _from_ranks(
    place: _RankSteps, begins: np.ndarray, times_ns: np.ndarray, periods: np.ndarray
) -> np.ndarray:
    at, part_ns = place.place(times_ns, periods)
    edges = np.zeros(len(times_ns), EDGE)
    edges["source"] = begins[place.trace_index] + at
    edges["segment"] = begins[place.trace_index] - place.trace_index + at
    edges["part_ns"] = part_ns
    return edges


def _to_waits(
    graph: DependencyGraph,
    places: list[_RankSteps],
    rows: np.ndarray,
    targets: np.ndarray,
    periods: np.ndarray,
    collectives: np.ndarray,
) -> np.ndarray:
    """Return the edges to waits from collectives, or from the one rank on which a wait depends.

    How long data of one rank were on their way is known only where the receiver was there first;
    else the edge takes what the receiver still waited.

    Args:
        graph: without edges.
        places: of its ranks.
        rows: of the dependencies in the window.
        targets: the nodes that they are for.
        periods: the steps of these nodes.
        collectives: numbers of the collectives on which those depend that depend on whole ones.
    """
    dependencies = graph.dependencies[rows]
    edges = np.zeros(len(rows), EDGE)
    edges["target"] = targets
    edges["dependency"] = rows
    edges["segment"] = NO_SEGMENT
    whole = dependencies["whole"]
    edges["source"][whole] = graph.begins[-1] + collectives
    alone = np.flatnonzero(~whole)
    for place, own in zip(places, rows_by(dependencies["late"][alone], len(places)), strict=True):
        chosen = alone[own]
        entered_ns = dependencies["entered_ns"][chosen]
        from_rank = _from_ranks(place, graph.begins, entered_ns, periods[chosen])
        for field in ("source", "segment", "part_ns"):
            edges[field][chosen] = from_rank[field]
    both_ns = np.maximum(dependencies["entered_ns"], dependencies["own_ns"])
    edges["transfer_ns"] = np.maximum(0, dependencies["complete_ns"] - both_ns)
    return edges


def ranges(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the numbers of all ranges [first, stop), one range after the other."""
    counts = stop - first
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) - np.repeat(before - first, counts))


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
