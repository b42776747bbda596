"""What each node of a run did, second by second: CPU, run queue, memory, network, disks, GPUs.

One rank of a node counts for it (native/src/node_counters.cpp). Other programs on the node count
along: that is what these figures are for, beside those of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import (
    NODE,
    NODE_BUSY,
    NODE_BYTES,
    NODE_CORES,
    NODE_GPU,
    NODE_MEMORY,
    NODE_MEMORY_TOTAL,
    NODE_RUNNABLE,
    NODE_STOLEN,
    Kind,
    LocationType,
)

if TYPE_CHECKING:
    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge import Trace

INTERVALS_MAX = 240  # of a node; fewer where there are many nodes
_INTERVALS_OF_ALL, _INTERVALS_LEAST = 8 * INTERVALS_MAX, 12
SHARE, COUNT, BYTES, RATE, WATTS = "share", "threads", "B", "B/s", "W"  # units


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSeries(Record):
    """One figure of a node over time.

    Attributes:
        name: cpu (time on all cores), stolen (cores that a hypervisor gave to others), runnable
            (threads that run or wait for a core), memory, received, sent (by networks other than
            loopback), read, written (by disks), gpu0 busy and so on.
        unit: share (of all there is), threads, B, B/s or W.
        mean: over time.
        most: in any interval.
        values: by interval.
    """

    name: str
    unit: str
    mean: float
    most: float
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeActivity(Record):
    """What one node did while a run went on.

    Attributes:
        node: name of the host.
        ranks: of the run, on it.
        cores: of the node; 0 if not known.
        memory_bytes: of the node; 0 if not known.
        begin_s: of the first interval, seconds after the run's first event.
        ends_s: of each interval; of a long run, or of many nodes, several seconds each.
        series: figures by interval.
    """

    node: str
    ranks: tuple[int, ...]
    cores: int
    memory_bytes: int
    begin_s: float
    ends_s: tuple[float, ...]
    series: tuple[NodeSeries, ...]


class _Intervals(NamedTuple):
    """The counters of a node.

    Attributes:
        node: name of the host.
        begin_s: of each interval, shape (intervals,), on the run's clock.
        end_s: shaped as `begin_s`.
        values: by counter, shaped as `begin_s`.
    """

    node: str
    begin_s: np.ndarray
    end_s: np.ndarray
    values: dict[str, np.ndarray]


def node_activities(trace: Trace) -> tuple[NodeActivity, ...]:
    """Return what each node did whose counters were recorded, in order of its first rank."""
    nodes: dict[str, list[int]] = {}
    for index, rank in enumerate(trace.ranks):
        nodes.setdefault(rank.status.boot_id, []).append(index)
    start_ns = min((_first_ns(trace, index) for index in range(len(trace.ranks))), default=0)
    most = min(INTERVALS_MAX, max(_INTERVALS_LEAST, _INTERVALS_OF_ALL // max(1, len(nodes))))
    found = []
    for indices in nodes.values():
        # A second rank counts if the first has ended, or could not see that another one counts.
        counted = [_intervals(trace, index, start_ns) for index in indices]
        counted = [intervals for intervals in counted if len(intervals.end_s)]
        if counted:
            ranks = tuple(trace.ranks[index].rank for index in indices)
            found.append(_activity(_joined(counted), ranks, most))
    return tuple(found)


def _first_ns(trace: Trace, index: int) -> int:
    events = trace.ranks[index].events
    if not len(events):
        return int(trace.clocks[index].to_run_ns(trace.ranks[index].status.opened_monotonic_ns))
    return int(trace.clocks[index].to_run_ns(int(events["begin_ns"].min())))


def _intervals(trace: Trace, index: int, start_ns: int) -> _Intervals:
    rank, clock = trace.ranks[index], trace.clocks[index]
    location = _node_location(rank)
    events = rank.events[:0]
    if location:
        events = rank.events[rank.events["kind"] == Kind.COUNTER]
        events = events[events["location"] == location]
    ends_ns, first, which = np.unique(events["end_ns"], return_index=True, return_inverse=True)
    values: dict[str, np.ndarray] = {}
    for name in np.unique(events["name"]).tolist():
        own = events["name"] == name
        column = values[rank.names[name]] = np.zeros(len(ends_ns))
        column[which[own]] = events["amount"][own]
    return _Intervals(
        node=rank.locations[location].name.removeprefix(NODE),
        begin_s=(clock.to_run_ns(events["begin_ns"][first]) - start_ns) / 1e9,
        end_s=(clock.to_run_ns(ends_ns) - start_ns) / 1e9,
        values=values,
    )


def _joined(counted: list[_Intervals]) -> _Intervals:
    """Return the intervals of the rank that counted longest, and those of others without it."""
    longest, *others = sorted(counted, key=lambda intervals: -len(intervals.end_s))
    first_s, last_s = longest.begin_s[0], longest.end_s[-1]
    parts = [(longest, np.ones(len(longest.end_s), dtype=bool))]
    parts += [(other, (other.end_s <= first_s) | (other.begin_s >= last_s)) for other in others]
    begin_s = np.concatenate([part.begin_s[kept] for part, kept in parts])
    order = np.argsort(begin_s, kind="stable")
    values = {}
    for name in dict.fromkeys(name for part, _ in parts for name in part.values):
        columns = [part.values.get(name, np.zeros(len(part.end_s)))[kept] for part, kept in parts]
        values[name] = np.concatenate(columns)[order]
    return _Intervals(
        node=longest.node,
        begin_s=begin_s[order],
        end_s=np.concatenate([part.end_s[kept] for part, kept in parts])[order],
        values=values,
    )


def _node_location(rank: RankTrace) -> int:
    """Return the number of the location of a node's counters; 0 if there is none."""
    for number, location in enumerate(rank.locations):
        if location.type is LocationType.PROCESS and location.name.startswith(NODE):
            return number
    return 0


def _activity(counted: _Intervals, ranks: tuple[int, ...], most: int) -> NodeActivity:
    count = len(counted.end_s)
    edges = np.linspace(0, count, min(count, most) + 1).round().astype(int)[:-1]
    lasted_s = np.maximum(1e-9, counted.end_s - counted.begin_s)
    widths_s = np.add.reduceat(lasted_s, edges)
    series = []
    for name, unit, values in _figures(counted, lasted_s):
        means = np.add.reduceat(values * lasted_s, edges) / widths_s
        series.append(
            NodeSeries(
                name=name,
                unit=unit,
                mean=float((values * lasted_s).sum() / lasted_s.sum()),
                most=float(values.max()),
                values=tuple(float(f"{value:.6g}") for value in means.tolist()),
            )
        )
    last = np.append(edges[1:], count) - 1
    return NodeActivity(
        node=counted.node,
        ranks=ranks,
        cores=int(counted.values.get(NODE_CORES, np.zeros(1)).max()),
        memory_bytes=int(counted.values.get(NODE_MEMORY_TOTAL, np.zeros(1)).max()),
        begin_s=round(float(counted.begin_s[0]), 6),
        ends_s=tuple(round(end_s, 6) for end_s in counted.end_s[last].tolist()),
        series=tuple(series),
    )


def _figures(counted: _Intervals, lasted_s: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
    """Return name, unit and values of each figure that the counters give."""
    values = counted.values
    found = []
    cores = np.maximum(1, values.get(NODE_CORES, np.ones(1)))
    for name, counter in (("cpu", NODE_BUSY), ("stolen", NODE_STOLEN)):
        if counter in values:
            found.append((name, SHARE, values[counter] / 1e9 / (lasted_s * cores)))
    if NODE_RUNNABLE in values:
        found.append(("runnable", COUNT, values[NODE_RUNNABLE]))
    if NODE_MEMORY in values:
        found.append(("memory", BYTES, values[NODE_MEMORY]))
    for name, counter in NODE_BYTES.items():
        if counter in values:
            found.append((name, RATE, values[counter] / lasted_s))
    for counter in sorted(name for name in values if name.startswith(NODE_GPU)):
        gpu, _, what = counter.removeprefix("node_").partition("_")
        if what == "busy_percent":
            found.append((f"{gpu} busy", SHARE, values[counter] / 100))
        elif what == "memory_bytes":
            found.append((f"{gpu} memory", BYTES, values[counter]))
        elif what == "power_mw":
            found.append((f"{gpu} power", WATTS, values[counter] / 1e3))
    return found
