"""The matched collectives and messages of a run, as arrays; `matching` makes them.

A row of `CALL` is one rank's part in a collective, a row of `INSTANCE` the whole collective, and a
row of `MESSAGE` one side of a message between two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import SYNCHRONISING, Group

if TYPE_CHECKING:
    from collections.abc import Iterable

NONE = -1  # an index that refers to nothing, or a peer that is not known
_SHOWN_MISMATCHES = 20

# One rank's part in a collective, and its side of a message. `trace` is the rank's index in
# `Trace.ranks` and `Matches.ranks`, the ranks that left a trace (not its global rank: a rank may
# have left none), `peer` a global rank or `NONE`, `instance` the row of the collective's instance,
# `partner` the row of the message's other side.
_SHARED = [
    ("enter_ns", "<i8"),
    ("exit_ns", "<i8"),
    ("amount", "<i8"),
    ("sequence", "<i8"),
    ("trace", "<i4"),
    ("step", "<i4"),
    ("peer", "<i4"),
    ("group", "<i4"),
    ("timed", "?"),  # whether `exit_ns` is the time of completion
]
CALL = np.dtype([*_SHARED, ("operation", "<i4"), ("path", "<i4"), ("instance", "<i4")])
MESSAGE = np.dtype([*_SHARED, ("tag", "<i4"), ("sends", "?"), ("partner", "<i4")])


NO_TIME = np.iinfo(np.int64).min

# Times are on the run's clock. `root_ns` is `NO_TIME` if the root is not known or left no trace.
INSTANCE = np.dtype(
    [
        ("first_ns", "<i8"),  # when the first rank entered
        ("last_ns", "<i8"),  # when the last rank entered
        ("root_ns", "<i8"),  # when the root entered
        ("complete_ns", "<i8"),  # when the last rank had its result
        ("largest", "<i8"),  # largest input of a rank, bytes
        ("mean", "<f8"),  # mean input of a rank, bytes
        ("sequence", "<i8"),
        ("group", "<i4"),
        ("operation", "<i4"),
        ("path", "<i4"),  # of its first rank
        ("ranks", "<i4"),  # number of ranks that took part
        ("agrees", "?"),  # whether these ranks agree on operation and bytes
        ("timed", "?"),  # whether the completion was seen on each of these ranks
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch(Record):
    """A collective on whose operation or size the ranks that took part do not agree.

    Attributes:
        group: name of the process group.
        sequence: number of the collective within the group, from 1.
        ranks: global ranks that took part.
        operations: the operation that each of these ranks named.
        bytes: input bytes of each of these ranks.
    """

    group: str
    sequence: int
    ranks: tuple[int, ...]
    operations: tuple[str, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matches:
    """The matched collectives and messages of a run.

    Attributes:
        ranks: global rank of each trace, shape (traces,); a `trace_index` is an index in it.
        groups: process groups; the field `group` of calls, messages and instances is an index here.
        operations: names of operations; the field `operation` of calls and instances is an index
            here.
        paths: by which collectives went (shared memory, ...), an empty one first, for those of
            which that is not known; the field `path` of calls and instances is an index here.
        local_groups: for each trace, the index in `groups` for each of its own group numbers.
        calls: array of `CALL`; traces in order, each trace's calls ordered by time of entry.
        call_starts: row of the first call of each trace, shape (traces + 1,).
        by_instance: rows of `calls`, ordered by instance, then by trace, shape (calls,).
        instance_starts: where each instance begins in `by_instance`, shape (instances + 1,).
        instances: array of `INSTANCE`, shape (instances,).
        messages: array of `MESSAGE`; traces in order, each trace's messages ordered by time of
            entry.
        message_starts: row of the first message of each trace, shape (traces + 1,).
    """

    ranks: np.ndarray
    groups: tuple[Group, ...]
    operations: tuple[str, ...]
    paths: tuple[str, ...]
    local_groups: tuple[np.ndarray, ...]
    calls: np.ndarray
    call_starts: np.ndarray
    by_instance: np.ndarray
    instance_starts: np.ndarray
    instances: np.ndarray
    messages: np.ndarray
    message_starts: np.ndarray

    def are(self, operations: Iterable[str]) -> np.ndarray:
        """Return a mask over `self.operations`: True where the name is among `operations`."""
        wanted = frozenset(operations)
        return np.array([name in wanted for name in self.operations], dtype=bool)

    def synchronising(self) -> np.ndarray:
        """Return a mask over calls: True where completion shows that all ranks have entered."""
        calls = self.calls
        sync = self.are(SYNCHRONISING)[calls["operation"]]
        return np.asarray(sync & calls["timed"] & self.instances["agrees"][calls["instance"]])

    def calls_of(self, trace_index: int) -> slice:
        """Return the slice of `calls` that holds the calls of a trace."""
        return slice(int(self.call_starts[trace_index]), int(self.call_starts[trace_index + 1]))

    def messages_of(self, trace_index: int) -> slice:
        """Return the slice of `messages` that holds the messages of a trace."""
        starts = self.message_starts
        return slice(int(starts[trace_index]), int(starts[trace_index + 1]))

    @property
    def mismatch_count(self) -> int:
        """Number of collectives on whose operation or size ranks do not agree."""
        return int((~self.instances["agrees"]).sum())

    def mismatches(self) -> tuple[Mismatch, ...]:
        """Return the first collectives on whose operation or size ranks do not agree."""
        found = np.flatnonzero(~self.instances["agrees"])[:_SHOWN_MISMATCHES]
        return tuple(self._mismatch(row) for row in found.tolist())

    def _mismatch(self, row: int) -> Mismatch:
        begin, end = self.instance_starts[row : row + 2]
        calls = self.calls[self.by_instance[begin:end]]
        return Mismatch(
            group=self.groups[int(self.instances["group"][row])].name,
            sequence=int(self.instances["sequence"][row]),
            ranks=tuple(self.ranks[calls["trace"]].tolist()),
            operations=tuple(self.operations[number] for number in calls["operation"].tolist()),
            bytes=tuple(calls["amount"].tolist()),
        )
