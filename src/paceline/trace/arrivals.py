"""Who came when to each collective, on the run's one clock.

A collective is the same on all its ranks by (group, sequence). Everything that tells waiting from
transfer, or a late rank from its victims, starts from the times at which the ranks issued it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.events import DRAIN, ROOTED, SYNCHRONISING, TO_ROOT, Kind
from paceline.trace.merge import collective_key

if TYPE_CHECKING:
    from paceline.trace.files import RankTrace
    from paceline.trace.merge import Trace

Key = tuple[str, int]
_FIELDS = ("begin_ns", "end_ns", "amount", "step", "name", "group", "sequence", "peer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One rank's part in a collective; times on the run's clock."""

    name: str
    issue_ns: int
    complete_ns: int
    step: int
    amount: int
    peer: int

    @property
    def synchronises(self) -> bool:
        """Whether completion tells that every rank has come."""
        return self.name in SYNCHRONISING


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """A time in which a rank's main thread could do nothing but wait for a collective."""

    begin_ns: int
    end_ns: int  # when the data was there; a drain's remaining work is not blocked
    ready_ns: int  # when the last rank that this one depends on had come
    synchronises: bool


def arrivals(trace: Trace) -> list[dict[Key, Arrival]]:
    """Return each rank's collectives by key, in order of issue."""
    result = []
    for rank, offset in zip(trace.ranks, trace.offset_ns, strict=True):
        mine = {}
        events = rank.of(Kind.COLLECTIVE)
        columns = (events[field].tolist() for field in _FIELDS)  # an array's rows are slow to read
        for begin, end, amount, step, name, group, sequence, peer in zip(*columns, strict=True):
            mine[rank.names[group], sequence] = Arrival(
                name=rank.names[name],
                issue_ns=begin + offset,
                complete_ns=end + offset,
                step=step,
                amount=amount,
                peer=peer,
            )
        result.append(mine)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """When the ranks of one collective came: the last of them, and its root where known."""

    last_ns: int
    root_ns: int | None = None


def meetings(by_rank: list[dict[Key, Arrival]]) -> dict[Key, Meeting]:
    """Return when everybody had come to each collective.

    Roots are numbered within their group; only in a group of all ranks does that number name a
    rank here, so other groups' roots stay unknown.
    """
    members: dict[Key, list[Arrival]] = {}
    for mine in by_rank:
        for key, arrival in mine.items():
            members.setdefault(key, []).append(arrival)
    result = {}
    for key, present in members.items():
        root = present[0].peer
        known = len(present) == len(by_rank) and present[0].name in ROOTED
        result[key] = Meeting(
            last_ns=max(arrival.issue_ns for arrival in present),
            root_ns=present[root].issue_ns if known and 0 <= root < len(present) else None,
        )
    return result


def _ready_ns(arrival: Arrival, meeting: Meeting, is_root: bool, begin_ns: int, end_ns: int) -> int:
    """Return when those had come on whom a rank blocked in a collective depends.

    A root that sends, and a rank that sends to a root, may go on before the other side has come,
    or not, as the backend likes: they waited for it only if it had come when they went on.
    """
    if arrival.synchronises or (is_root and arrival.name in TO_ROOT):
        return meeting.last_ns
    if meeting.root_ns is None:
        return begin_ns
    if not is_root and arrival.name not in TO_ROOT:
        return meeting.root_ns
    other_ns = meeting.last_ns if is_root else meeting.root_ns
    return other_ns if other_ns <= end_ns else begin_ns


def blocked(
    rank: RankTrace,
    offset_ns: int,
    mine: dict[Key, Arrival],
    met: dict[Key, Meeting],
) -> dict[int, Blocked]:
    """Return what the rank's wait events were for, by the event's position in `of(Kind.WAIT)`."""
    ordered = list(mine.items())
    issues = np.array([arrival.issue_ns for _, arrival in ordered], dtype=np.int64)
    backwards = rank.of(Kind.BACKWARD)
    starts = backwards["begin_ns"].astype(np.int64) + offset_ns
    found = {}
    for i, event in enumerate(rank.of(Kind.WAIT)):
        begin, end = int(event["begin_ns"]) + offset_ns, int(event["end_ns"]) + offset_ns
        if rank.names[event["name"]] == DRAIN:
            opened = int(np.searchsorted(starts, begin, "right")) - 1
            first = int(np.searchsorted(issues, starts[opened])) if opened >= 0 else len(issues)
            stop = int(np.searchsorted(issues, end, "right"))
            keys = [key for key, _ in ordered[first:stop]]
            complete = max((mine[key].complete_ns for key in keys), default=begin)
            common = [key for key in keys if mine[key].synchronises]
            ready = max((met[key].last_ns for key in common), default=begin)
            synchronises = bool(common)
            end = min(end, max(begin, complete))
        else:
            key = collective_key(rank, event)
            arrival = mine.get(key)
            synchronises = arrival is not None and arrival.synchronises
            ready = begin
            if arrival is not None:
                is_root = arrival.peer == rank.rank
                ready = _ready_ns(arrival, met[key], is_root, begin, end)
        found[i] = Blocked(
            begin_ns=begin,
            end_ns=end,
            ready_ns=min(max(ready, begin), end),
            synchronises=synchronises,
        )
    return found
