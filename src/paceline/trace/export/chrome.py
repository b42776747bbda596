"""Writes a trace as Chrome's JSON, which Perfetto opens: a process per rank, a track per location.

Times are microseconds on the run's one clock, from 0. Events of a thread are nested, as the format
wants them on one track. Collectives and messages overlap, so those in flight at the same time
get tracks of their own. The text is produced in chunks, since it may be larger than memory.

An arrow leads from each send to its receive. A step is called ``ProfilerStep#N``, as torch's own
profiler calls it.

Format: Trace Event Format, Google, 2016 (phases X, M, C, s and f).
"""

from __future__ import annotations

import heapq
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.core.files import commit_chunks
from paceline.trace.export.source import ExportSummary, first_ns, message_rows
from paceline.trace.format.events import BACKEND, BY_RUN, MAIN, Kind, LocationType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge import Trace
    from paceline.trace.merge.clocks import ClockCorrection

_FIRST_TRACK = 10_000  # of locations other than the main thread and communication


def write_chrome(
    trace: Trace,
    path: Path,
    *,
    counters: bool = True,
    on_rank: Callable[[int], None] | None = None,
) -> ExportSummary:
    """Write a run as one file.

    Args:
        trace: the run's traces.
        path: of the file; one that is there is replaced.
        counters: whether they are written.
        on_rank: is called with the number of ranks that are written, after each.

    Raises:
        StorageError: the file cannot be written; what was there before is unchanged.
    """
    count = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal count
        for event in _events(trace, counters=counters, on_rank=on_rank):
            count += event["ph"] != "M"
            yield event

    commit_chunks(path, (text.encode() for text in _text(trace, counted())))
    return ExportSummary(path=path, ranks=len(trace.ranks), events=count)


def chrome_json(trace: Trace) -> Iterator[str]:
    """Yield the trace as parts of one JSON text."""
    return _text(trace, _events(trace, counters=True, on_rank=None))


def _text(trace: Trace, events: Iterator[dict[str, Any]]) -> Iterator[str]:
    ranks = [rank.rank for rank in trace.ranks]
    information: dict[str, Any] = {"rank": ranks[0], "world_size": trace.world_size}
    if backend := _backend(trace):
        information["backend"] = backend
    information["ranks"] = ranks
    yield f'{{"displayTimeUnit":"ms","distributedInfo":{json.dumps(information)},"traceEvents":[\n'
    before = ""
    for event in events:
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "\n]}\n"


def _backend(trace: Trace) -> str:
    """Return what carries the run's messages; empty if the traces do not say."""
    if any(BY_RUN in rank.names for rank in trace.ranks):
        return "mpi"
    names = (name for rank in trace.ranks for name in rank.names if name.startswith(BACKEND))
    return ",".join(dict.fromkeys(name.removeprefix(BACKEND) for name in names))


def _events(
    trace: Trace, *, counters: bool, on_rank: Callable[[int], None] | None
) -> Iterator[dict[str, Any]]:
    start_ns = first_ns(trace)
    for index, (rank, clock) in enumerate(zip(trace.ranks, trace.clocks, strict=True)):
        for event in _rank_events(rank, clock, start_ns, _flows(trace, index)):
            if counters or event["ph"] != "C":
                yield event
        if on_rank is not None:
            on_rank(index + 1)


class _Flow(NamedTuple):
    """The arrow of a message: its number, and when it leaves the send or reaches the receive."""

    number: int
    at_ns: int
    sends: bool


def _flows(trace: Trace, index: int) -> dict[int, _Flow]:
    """Return the arrows of a rank's messages whose other side is known, by the event's row."""
    matches = trace.matches
    own = matches.messages_of(index)
    messages, rows = matches.messages[own], message_rows(trace, index)
    matched = np.flatnonzero(messages["partner"] >= 0)
    partners = messages["partner"][matched]
    sends = messages["sends"][matched]
    numbers = np.where(sends, own.start + matched, partners)
    entered = matches.messages["enter_ns"]
    # An arrow ends within the receive, which may have been issued before the send.
    at_ns = np.maximum(entered[own.start + matched], entered[np.where(sends, 0, partners)] * ~sends)
    columns = (rows[matched], numbers, at_ns, sends)
    return {
        row: _Flow(number, at, bool(is_send))
        for row, number, at, is_send in zip(*(column.tolist() for column in columns), strict=True)
    }


def _rank_events(
    rank: RankTrace, clock: ClockCorrection, start_ns: int, flows: dict[int, _Flow]
) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", rank.rank, 0, name=f"rank {rank.rank}")
    yield _metadata("process_sort_index", rank.rank, 0, sort_index=rank.rank)
    yield _metadata("thread_name", rank.rank, MAIN, name="main")
    for number in np.unique(rank.events["location"]).tolist():
        if _is_own_track(rank, number):
            name = rank.locations[number].name
            yield _metadata("thread_name", rank.rank, _FIRST_TRACK + number, name=name)
    events = rank.events
    order = np.lexsort((-events["end_ns"].astype(np.int64), events["begin_ns"]))
    tracks = _Tracks()
    for row in order.tolist():
        event = events[row]
        kind = Kind(event["kind"])
        track = int(event["location"])
        begin_ns = clock.to_run_ns(int(event["begin_ns"])) - start_ns
        end_ns = max(begin_ns, clock.to_run_ns(int(event["end_ns"])) - start_ns)
        if kind is Kind.COUNTER:
            yield _counter(rank, event, _microseconds(begin_ns))
            continue
        if _is_own_track(rank, track):
            track += _FIRST_TRACK
        elif track != MAIN:
            track, opened = tracks.take(begin_ns, end_ns)
            if opened:
                name = "communication" if track == 1 else f"communication {track}"
                yield _metadata("thread_name", rank.rank, track, name=name)
        yield {
            "ph": "X",
            "pid": rank.rank,
            "tid": track,
            "ts": _microseconds(begin_ns),
            "dur": _microseconds(end_ns - begin_ns),
            "name": _name(rank, event, kind),
            "cat": kind.name.lower(),
            "args": _arguments(rank, event),
        }
        if (flow := flows.get(row)) is not None:
            at_ns = min(max(flow.at_ns - start_ns, begin_ns), end_ns)
            yield _flow(rank.rank, track, flow, _microseconds(at_ns))


def _name(rank: RankTrace, event: np.void, kind: Kind) -> str:
    """Return the name of an event; that of a step is what torch's profiler calls it.

    Tools for its traces, such as HTA, find the steps by it.
    """
    if kind is Kind.STEP:
        return f"ProfilerStep#{int(event['step'])}"
    return rank.names[event["name"]] or kind.name.lower()


def _is_own_track(rank: RankTrace, location: int) -> bool:
    kind = rank.locations[location].type
    return location != MAIN and kind is not LocationType.COMMUNICATION


def _arguments(rank: RankTrace, event: np.void) -> dict[str, Any]:
    found: dict[str, Any] = {"step": int(event["step"])}
    if event["amount"]:
        unit = "not_running_ns" if event["kind"] == Kind.WAIT else "bytes"
        found[unit] = int(event["amount"])
    if event["group"]:
        found["group"] = rank.groups[event["group"]].name
        found["sequence"] = int(event["sequence"])
    if event["peer"] >= 0:
        found["peer"] = int(event["peer"])
    if event["tag"]:
        found["tag"] = int(event["tag"])
    return found


def _counter(rank: RankTrace, event: np.void, ts: float) -> dict[str, Any]:
    name = rank.names[event["name"]]
    value = {"value": int(event["amount"])}
    return {"ph": "C", "pid": rank.rank, "tid": 0, "ts": ts, "name": name, "args": value}


def _flow(pid: int, tid: int, flow: _Flow, ts: float) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "s" if flow.sends else "f", "pid": pid, "tid": tid, "ts": ts}
    event |= {"id": flow.number, "name": "message", "cat": "message", "args": {}}
    return event if flow.sends else {**event, "bp": "e"}


def _metadata(what: str, pid: int, tid: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": arguments}


def _microseconds(ns: int) -> float:
    return ns / 1000


class _Tracks:
    """Gives overlapping events different tracks, and a track that is free again to the next."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []  # (end, track)
        self._free: list[int] = []
        self._count = 0

    def take(self, begin_ns: int, end_ns: int) -> tuple[int, bool]:
        """Return a track that is free at `begin_ns`, and whether it is a new one."""
        while self._busy and self._busy[0][0] <= begin_ns:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        opened = not self._free
        if opened:
            self._count += 1
            heapq.heappush(self._free, self._count)
        track = heapq.heappop(self._free)
        heapq.heappush(self._busy, (end_ns, track))
        return track, opened
