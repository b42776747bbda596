"""Who came when to each collective, on the run's one clock.

A collective is the same on all its ranks by (group, sequence). Everything that tells waiting from
transfer, or a late rank from its victims, starts from the times at which the ranks issued it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.trace.events import DRAIN, ROOTED, SYNCHRONISING, TO_ROOT, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.files import RankTrace
    from paceline.trace.merge import Clock, Trace

Key = tuple[str, int]
_FIELDS = ("amount", "step", "name", "group", "sequence", "peer")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """When the ranks of one collective came: the last of them, and its root where known."""

    last_ns: int
    root_ns: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encounters:
    """All that a run's ranks did together; found once, as every analysis starts from it.

    Attributes:
        arrivals: each rank's collectives by key, in order of issue.
        meetings: when everybody had come to each collective.
        blocked: what each rank's wait events were for, in the order of `of(Kind.WAIT)`.
    """

    arrivals: tuple[dict[Key, Arrival], ...]
    meetings: dict[Key, Meeting]
    blocked: tuple[tuple[Blocked, ...], ...]


def encounters(trace: Trace) -> Encounters:
    """Return who came when to each collective, and who was blocked for it how long."""
    by_rank = tuple(arrivals(trace))
    met = meetings(by_rank, trace.world_size)
    waits = (
        blocked(rank, clock, mine, met)
        for rank, clock, mine in zip(trace.ranks, trace.clocks, by_rank, strict=True)
    )
    return Encounters(arrivals=by_rank, meetings=met, blocked=tuple(waits))


def arrivals(trace: Trace) -> list[dict[Key, Arrival]]:
    """Return each rank's collectives by key, in order of issue."""
    result = []
    for rank, clock in zip(trace.ranks, trace.clocks, strict=True):
        events = rank.of(Kind.COLLECTIVE)
        begins, ends = clock.to_run_ns(events["begin_ns"]), clock.to_run_ns(events["end_ns"])
        columns = [begins.tolist(), ends.tolist()]  # an array's rows are slow to read
        columns += [events[field].tolist() for field in _FIELDS]
        mine = {}
        for begin, end, amount, step, name, group, sequence, peer in zip(*columns, strict=True):
            mine[rank.names[group], sequence] = Arrival(
                name=rank.names[name],
                issue_ns=begin,
                complete_ns=end,
                step=step,
                amount=amount,
                peer=peer,
            )
        result.append(mine)
    return result


def meetings(by_rank: Sequence[dict[Key, Arrival]], world_size: int) -> dict[Key, Meeting]:
    """Return when everybody had come to each collective.

    Roots are numbered within their group. Only where all of the run's ranks take part, and all
    left a trace, does that number name a rank here; other roots stay unknown.
    """
    members: dict[Key, list[Arrival]] = {}
    for mine in by_rank:
        for key, arrival in mine.items():
            members.setdefault(key, []).append(arrival)
    result = {}
    for key, present in members.items():
        root = present[0].peer
        known = len(present) == world_size and present[0].name in ROOTED
        result[key] = Meeting(
            last_ns=max(arrival.issue_ns for arrival in present),
            root_ns=present[root].issue_ns if known and 0 <= root < world_size else None,
        )
    return result


def blocked(
    rank: RankTrace, clock: Clock, mine: dict[Key, Arrival], met: dict[Key, Meeting]
) -> tuple[Blocked, ...]:
    """Return what the rank's wait events were for, in the order of `of(Kind.WAIT)`."""
    issued = list(mine.items())
    issues = [arrival.issue_ns for _, arrival in issued]
    starts = clock.to_run_ns(rank.of(Kind.BACKWARD)["begin_ns"]).tolist()
    waits = rank.of(Kind.WAIT)
    begins, ends = clock.to_run_ns(waits["begin_ns"]), clock.to_run_ns(waits["end_ns"])
    columns = (waits[field].tolist() for field in ("name", "group", "sequence"))
    found = []
    for begin, end, name, group, sequence in zip(
        begins.tolist(), ends.tolist(), *columns, strict=True
    ):
        if rank.names[name] == DRAIN:
            opened = bisect_right(starts, begin) - 1
            first = bisect_left(issues, starts[opened]) if opened >= 0 else len(issues)
            within = issued[first : bisect_right(issues, end)]
            found.append(_drained(begin, end, within, met))
        else:
            key = (rank.names[group], sequence)
            found.append(_waited(rank.rank, begin, end, mine.get(key), met.get(key)))
    return tuple(found)


def _drained(
    begin_ns: int, end_ns: int, issued: list[tuple[Key, Arrival]], met: dict[Key, Meeting]
) -> Blocked:
    """Return what the end of a backward pass waited for, of what was issued within it.

    What completed later was not waited for here: the script holds its work and waits elsewhere.
    """
    awaited = [(key, arrival) for key, arrival in issued if arrival.complete_ns <= end_ns]
    complete_ns = max((arrival.complete_ns for _, arrival in awaited), default=begin_ns)
    common = [met[key].last_ns for key, arrival in awaited if arrival.synchronises]
    end_ns = max(begin_ns, complete_ns)
    return Blocked(
        begin_ns=begin_ns,
        end_ns=end_ns,
        ready_ns=min(max([begin_ns, *common]), end_ns),
        synchronises=bool(common),
    )


def _waited(
    rank: int, begin_ns: int, end_ns: int, arrival: Arrival | None, meeting: Meeting | None
) -> Blocked:
    ready_ns = begin_ns
    if arrival is not None and meeting is not None:
        is_root = meeting.root_ns is not None and arrival.peer == rank
        ready_ns = _ready_ns(arrival, meeting, is_root, begin_ns, end_ns)
    return Blocked(
        begin_ns=begin_ns,
        end_ns=end_ns,
        ready_ns=min(max(ready_ns, begin_ns), end_ns),
        synchronises=arrival is not None and arrival.synchronises,
    )


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
