"""Writes a run as Chakra execution traces: a graph per rank, which simulators of networks replay.

The main thread's time is cut where it issues a collective or message, where it waits, and where its
phase changes. Its pieces are compute nodes in a chain; what is issued depends on the piece before,
and the piece after a wait on what was waited for::

    main thread   | forward | backward   | backward |  wait  | optimizer |
                            ^ issue of an all-reduce ... completion
    nodes         forward --> backward --> backward ------------> optimizer
                                  '------> all_reduce ----------------'

Nobody knows which tensors a piece reads, so that these are the dependencies that the program's own
order makes. A file per rank: a varint before each message of protobuf, GlobalMetadata first.
`comm_groups.json` has the ranks of each process group (`pg_name`), as ASTRA-sim wants them.

Format: MLCommons Chakra, schema/protobuf/et_def.proto (version 0.0.4).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import storage_errors
from paceline.core.files import commit_chunks, commit_text, replaced_folder
from paceline.trace.export.source import (
    COMMUNICATION_KINDS,
    ONE_SIDED,
    ExportSummary,
    first_ns,
    message_rows,
    times_of,
)
from paceline.trace.format.events import MAIN, RECV, SEND, Group, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge import Trace

_SCHEMA_VERSION = "0.0.4"
_COMPUTE, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7  # NodeType
COLLECTIVE_TYPES = {  # CollectiveCommType
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
# What the format has no type for, and what is written instead.
_NEAREST = {
    "fence": "barrier",
    "open_fence": "barrier",
    "make_communicator": "barrier",
    "make_window": "barrier",
    "open_file": "barrier",
    "scan": "all_reduce",
    "neighbor_all_gather": "all_gather",
    "neighbor_all_to_all": "all_to_all",
}
_NOT_COMPUTE = (
    *(*COMMUNICATION_KINDS, Kind.COUNTER, Kind.STEP, Kind.SAMPLE),
    *(Kind.LAYER, Kind.GRADIENT),  # of some steps only: graphs of all steps are alike
)


def write_chakra(
    trace: Trace,
    folder: Path,
    *,
    on_rank: Callable[[int], None] | None = None,
) -> ExportSummary:
    """Write a run as a folder of files `trace.RANK.et`.

    Args:
        trace: the run's traces.
        folder: is made; one that is there is replaced.
        on_rank: is called with the number of ranks that are written, after each.

    Raises:
        StorageError: the folder cannot be written; what was there before is unchanged.
    """
    groups: dict[Group, int] = {}
    lost: dict[str, int] = {}
    start_ns = first_ns(trace)
    nodes = 0
    fix = "Free space, or choose another folder"
    with (
        storage_errors("cannot write the traces", where=folder, fix=fix),
        replaced_folder(folder) as partial,
    ):
        partial.mkdir()
        for index, rank in enumerate(trace.ranks):
            graph = _RankGraph(trace, index, start_ns, groups, lost)
            commit_chunks(partial / f"trace.{rank.rank}.et", graph.messages())
            nodes += graph.nodes
            if on_rank is not None:
                on_rank(index + 1)
        members = {
            str(number): list(group.members or range(trace.world_size))
            for group, number in groups.items()
        }
        commit_text(partial / "comm_groups.json", json.dumps(members) + "\n")
    cautions = tuple(f"{count:,} {what}" for what, count in sorted(lost.items()))
    return ExportSummary(path=folder, ranks=len(trace.ranks), events=nodes, cautions=cautions)


class _Issue(NamedTuple):
    """A collective or message that the rank issues, with the rest of its node."""

    begin_ns: int
    end_ns: int
    key: tuple[int, ...]  # by which a wait names it
    name: str
    type: int
    attributes: bytes


class _Activity(NamedTuple):
    """What the main thread does for a while; not nested in another one."""

    begin_ns: int
    end_ns: int
    row: int  # of the event; -1 between events


class _RankGraph:
    """The nodes of a rank, made one after the other.

    Attributes:
        nodes: number of nodes so far.
    """

    def __init__(
        self,
        trace: Trace,
        index: int,
        start_ns: int,
        groups: dict[Group, int],
        lost: dict[str, int],
    ) -> None:
        self.rank: RankTrace = trace.ranks[index]
        times = times_of(self.rank, trace.clocks[index])
        self.begin_ns, self.end_ns = times.begin_ns - start_ns, times.end_ns - start_ns
        self.world_size = trace.world_size
        self.nodes = 0
        self._groups, self._lost = groups, lost
        messages = trace.matches.messages[trace.matches.messages_of(index)]
        known = message_rows(trace, index)[messages["partner"] >= 0]
        self._has_partner = np.zeros(len(self.rank.events), dtype=bool)
        self._has_partner[known] = True
        self._previous: list[int] = []  # the main thread's last node
        self._joined: list[int] = []  # what was waited for since

    def messages(self) -> Iterator[bytes]:
        """Yield the messages of the rank's file."""
        attributes = _integer("rank", self.rank.rank), _integer("world_size", self.world_size)
        yield _delimited(
            _text(1, _SCHEMA_VERSION) + b"".join(_field(2, each) for each in attributes)
        )
        issues = self._issues()
        pending: dict[tuple[int, ...], tuple[int, int]] = {}  # id and end of what is in flight
        at = 0
        for activity in self._activities():
            begin_ns = activity.begin_ns
            waits = activity.row >= 0 and self.rank.events["kind"][activity.row] == Kind.WAIT
            while at < len(issues) and issues[at].begin_ns < activity.end_ns:
                issue = issues[at]
                if not waits and issue.begin_ns > begin_ns:
                    yield self._compute(activity, begin_ns, issue.begin_ns)
                    begin_ns = issue.begin_ns
                pending[issue.key] = self.nodes, issue.end_ns
                yield self._issue(issue)
                at += 1
            if waits:
                self._join(activity, pending)
            elif activity.end_ns > begin_ns:
                yield self._compute(activity, begin_ns, activity.end_ns)
        for issue in issues[at:]:
            yield self._issue(issue)

    def _compute(self, activity: _Activity, begin_ns: int, end_ns: int) -> bytes:
        name = "other"
        if activity.row >= 0:
            event = self.rank.events[activity.row]
            name = self.rank.names[event["name"]] or Kind(event["kind"]).name.lower()
        depends = [*self._previous, *self._joined]
        self._previous, self._joined = [self.nodes], []
        return self._node(name, _COMPUTE, depends, (begin_ns, end_ns), _boolean("is_cpu_op", True))

    def _issue(self, issue: _Issue) -> bytes:
        depends = [*self._previous, *self._joined]
        span = (issue.begin_ns, issue.end_ns)
        return self._node(issue.name, issue.type, depends, span, issue.attributes)

    def _node(
        self, name: str, kind: int, depends: list[int], span: tuple[int, int], attributes: bytes
    ) -> bytes:
        begin_us, end_us = span[0] // 1000, span[1] // 1000
        dependencies = b"".join(map(_varint, depends))
        number = self.nodes
        self.nodes += 1
        return _delimited(
            _number(1, number)
            + _text(2, name)
            + _number(3, kind)
            + (_field(5, dependencies) if depends else b"")
            + _number(6, begin_us)
            + _number(7, end_us - begin_us)
            + attributes
        )

    def _join(self, wait: _Activity, pending: dict[tuple[int, ...], tuple[int, int]]) -> None:
        """Let the next node depend on what a wait was for."""
        event = self.rank.events[wait.row]
        name = self.rank.names[event["name"]]
        kind = {SEND: Kind.SEND, RECV: Kind.RECV}.get(name, Kind.COLLECTIVE)
        named = pending.pop(_key(int(kind), event), None) if event["sequence"] else None
        if named is not None:
            self._joined.append(named[0])
            return
        done = [key for key, (_, end_ns) in pending.items() if end_ns <= wait.end_ns]
        self._joined += [pending.pop(key)[0] for key in done]

    def _activities(self) -> Iterator[_Activity]:
        """Yield what the main thread does, without gaps, the innermost of nested events."""
        events = self.rank.events
        rows = np.flatnonzero((events["location"] == MAIN) & ~np.isin(events["kind"], _NOT_COMPUTE))
        rows = rows[self.end_ns[rows] > self.begin_ns[rows]][::-1]
        rows = rows[np.lexsort((-self.end_ns[rows], self.begin_ns[rows]))]
        now = int(self.begin_ns.min()) if len(events) else 0
        stack: list[tuple[int, int]] = []  # ends and rows of the events that are open

        def until(moment: int) -> Iterator[_Activity]:
            nonlocal now
            while stack and stack[-1][0] <= moment:
                end_ns, row = stack.pop()
                if end_ns > now:
                    yield _Activity(now, end_ns, row)
                    now = end_ns
            if moment > now:
                yield _Activity(now, moment, stack[-1][1] if stack else -1)
                now = moment

        for row, begin, end in zip(
            rows.tolist(), self.begin_ns[rows].tolist(), self.end_ns[rows].tolist(), strict=True
        ):
            yield from until(begin)
            stack.append((min(end, stack[-1][0]) if stack else end, row))
        yield from until(int(self.end_ns.max()) if len(events) else 0)

    def _issues(self) -> list[_Issue]:
        """Return the collectives and messages, in order of issue."""
        events = self.rank.events
        rows = np.flatnonzero(np.isin(events["kind"], COMMUNICATION_KINDS))
        rows = rows[np.argsort(self.begin_ns[rows], kind="stable")]
        found = []
        for row in rows.tolist():
            event = events[row]
            kind, name = Kind(event["kind"]), self.rank.names[event["name"]]
            if kind is Kind.COLLECTIVE:
                node, attributes = _COLLECTIVE, self._collective(event, name)
            elif name in ONE_SIDED or not self._has_partner[row]:
                self._lose("messages were left out: they have one side only")
                continue
            else:
                node = _SEND if kind is Kind.SEND else _RECV
                attributes = self._message(event, sends=kind is Kind.SEND)
            times = int(self.begin_ns[row]), int(self.end_ns[row])
            found.append(_Issue(*times, _key(int(kind), event), name, node, attributes))
        return found

    def _collective(self, event: np.void, name: str) -> bytes:
        word = _NEAREST.get(name, name)
        if word != name:
            self._lose(f"collectives {name} were written as {word}")
        elif name not in COLLECTIVE_TYPES:
            word = "all_reduce"
            self._lose(f"collectives {name} were written as {word}")
        group = self._groups.setdefault(self.rank.groups[event["group"]], len(self._groups) + 1)
        return (
            _boolean("is_cpu_op", False)
            + _field(10, _integer("comm_type", COLLECTIVE_TYPES[word]))
            + _field(10, _integer("comm_size", int(event["amount"])))
            + _field(10, _text(1, "pg_name") + _text(29, str(group)))
            + (_field(10, _integer("root", int(event["peer"]))) if event["peer"] >= 0 else b"")
        )

    def _message(self, event: np.void, *, sends: bool) -> bytes:
        peer, tag = int(event["peer"]), int(event["tag"])
        source, target = (self.rank.rank, peer) if sends else (peer, self.rank.rank)
        return (
            _boolean("is_cpu_op", False)
            + _field(10, _integer("comm_size", int(event["amount"])))
            + _field(10, _integer("comm_src", source, _INT32))
            + _field(10, _integer("comm_dst", target, _INT32))
            + _field(10, _integer("comm_tag", tag, _INT32))
        )

    def _lose(self, what: str) -> None:
        self._lost[what] = self._lost.get(what, 0) + 1


def _key(kind: int, event: np.void) -> tuple[int, ...]:
    """Return by what a wait names a collective, or a message."""
    found = (kind, int(event["group"]), int(event["sequence"]))
    return found if kind == Kind.COLLECTIVE else (*found, int(event["peer"]), int(event["tag"]))


# Protobuf's encoding: https://protobuf.dev/programming-guides/encoding
_INT32, _INT64, _BOOL = 7, 9, 27  # fields of an attribute's value


def _varint(value: int) -> bytes:
    """Return an integer, seven bits to a byte; a negative one has 64 bits.

    >>> _varint(300).hex()
    'ac02'
    """
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _field(field, text.encode("utf-8", "replace"))


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _integer(name: str, value: int, field: int = _INT64) -> bytes:
    """Return an attribute's content."""
    return _text(1, name) + _number(field, value)


def _boolean(name: str, value: bool) -> bytes:
    """Return an attribute of a node."""
    return _field(10, _text(1, name) + _number(_BOOL, int(value)))
