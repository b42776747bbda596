"""What the ranks of a run did together, as arrays; `matching` makes them.

A row of `CALL` is one rank's part in a collective, a row of `INSTANCE` the collective as its ranks
joined it, a row of `MESSAGE` one side of a message between two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.events import SYNCHRONISING, Group

if TYPE_CHECKING:
    from collections.abc import Iterable

NONE = -1  # an index that refers to nothing, or a peer that is not known
_SHOWN_MISMATCHES = 20

# One rank's part in a collective, and its side of a message. `rank` is the index of its trace,
# `instance` the row of the collective's instance, `partner` that of the message's other side.
_SHARED = [
    ("enter_ns", "<i8"),
    ("exit_ns", "<i8"),
    ("amount", "<i8"),
    ("sequence", "<i8"),
    ("rank", "<i4"),
    ("step", "<i4"),
    ("peer", "<i4"),
    ("group", "<i4"),
    ("timed", "?"),  # whether `exit_ns` is its completion
]
CALL = np.dtype([*_SHARED, ("operation", "<i4"), ("instance", "<i4")])
MESSAGE = np.dtype([*_SHARED, ("tag", "<i4"), ("sends", "?"), ("partner", "<i4")])


NO_TIME = np.iinfo(np.int64).min

# Times are on the run's clock, `NO_TIME` for a root that is not known or left no trace.
INSTANCE = np.dtype(
    [
        ("first_ns", "<i8"),  # when its first rank entered
        ("last_ns", "<i8"),  # when its last rank entered
        ("root_ns", "<i8"),  # when its root entered
        ("complete_ns", "<i8"),  # when its last rank had its result
        ("largest", "<i8"),  # bytes that a rank gave, at most
        ("mean", "<f8"),  # bytes that a rank gave
        ("sequence", "<i8"),
        ("group", "<i4"),
        ("operation", "<i4"),
        ("ranks", "<i4"),  # how many joined
        ("agrees", "?"),  # whether they agree on operation and bytes
        ("timed", "?"),  # whether each of them saw it complete
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch(Record):
    """Ranks that joined one collective and do not agree on what it is.

    Attributes:
        group: name of the process group.
        sequence: of the collective within the group, from 1.
        ranks: global ranks that joined.
        operations: that each of them named.
        bytes: that each of them gave.
    """

    group: str
    sequence: int
    ranks: tuple[int, ...]
    operations: tuple[str, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matches:
    """All that a run's ranks did together.

    Attributes:
        ranks: global rank of each trace.
        groups: that calls and messages refer to.
        operations: names that calls refer to.
        local_groups: for each trace, the row of `groups` for each of its own group numbers.
        calls: of `CALL`; traces in order, each trace's calls by time of entry.
        call_starts: first call of each trace, shape (traces + 1,).
        by_instance: rows of `calls`, ordered by instance, then by trace.
        instance_starts: where each instance begins in `by_instance`, shape (instances + 1,).
        instances: of `INSTANCE`.
        messages: of `MESSAGE`; traces in order, each trace's messages by time of entry.
        message_starts: first message of each trace, shape (traces + 1,).
    """

    ranks: np.ndarray
    groups: tuple[Group, ...]
    operations: tuple[str, ...]
    local_groups: tuple[np.ndarray, ...]
    calls: np.ndarray
    call_starts: np.ndarray
    by_instance: np.ndarray
    instance_starts: np.ndarray
    instances: np.ndarray
    messages: np.ndarray
    message_starts: np.ndarray

    def are(self, operations: Iterable[str]) -> np.ndarray:
        """Return a mask over `self.operations`: which of them are among `operations`."""
        wanted = frozenset(operations)
        return np.array([name in wanted for name in self.operations], dtype=bool)

    def synchronising(self) -> np.ndarray:
        """Return a mask over calls: those whose completion tells that all ranks have entered."""
        calls = self.calls
        sync = self.are(SYNCHRONISING)[calls["operation"]]
        return np.asarray(sync & calls["timed"] & self.instances["agrees"][calls["instance"]])

    def calls_of(self, trace: int) -> slice:
        """Return where the calls of a trace are, by its index."""
        return slice(int(self.call_starts[trace]), int(self.call_starts[trace + 1]))

    def messages_of(self, trace: int) -> slice:
        """Return where the messages of a trace are, by its index."""
        return slice(int(self.message_starts[trace]), int(self.message_starts[trace + 1]))

    @property
    def mismatch_count(self) -> int:
        """How many collectives ranks joined without agreeing on what they are."""
        return int((~self.instances["agrees"]).sum())

    def mismatches(self) -> tuple[Mismatch, ...]:
        """Return the first of the collectives in which ranks do not agree."""
        found = np.flatnonzero(~self.instances["agrees"])[:_SHOWN_MISMATCHES]
        return tuple(self._mismatch(row) for row in found.tolist())

    def _mismatch(self, row: int) -> Mismatch:
        begin, end = self.instance_starts[row : row + 2]
        calls = self.calls[self.by_instance[begin:end]]
        return Mismatch(
            group=self.groups[int(self.instances["group"][row])].name,
            sequence=int(self.instances["sequence"][row]),
            ranks=tuple(self.ranks[calls["rank"]].tolist()),
            operations=tuple(self.operations[number] for number in calls["operation"].tolist()),
            bytes=tuple(calls["amount"].tolist()),
        )
