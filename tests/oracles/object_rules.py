"""The rules as they were before arrays: an object for each rank's part in a collective.

Kept as the oracle of the array rules in `paceline.trace`: slow, plain, and one rule at a time. It
knows no messages between two ranks, no disagreement, and no completion that nobody saw.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.trace.analysis.communication import Traffic
from paceline.trace.analysis.phases import _step_bounds
from paceline.trace.format.events import (
    DRAIN,
    MAIN,
    ROOTED,
    SYNCHRONISING,
    TO_ROOT,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge import Trace
    from paceline.trace.merge.clocks import ClockCorrection as Clock

_PHASE_OF = {
    Kind.INPUT: PHASES.index("input"),
    Kind.COPY: PHASES.index("copy"),
    Kind.FORWARD: PHASES.index("forward"),
    Kind.BACKWARD: PHASES.index("backward"),
    Kind.OPTIMIZER: PHASES.index("optimizer"),
    Kind.CHECKPOINT: PHASES.index("checkpoint"),
    Kind.EVALUATION: PHASES.index("evaluation"),
    Kind.HOST: PHASES.index("host"),
}
_TRANSFER, _WAITING, _OTHER = (PHASES.index(phase) for phase in ("transfer", "waiting", "other"))


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
        blocked: what each rank's wait events were for, in the order of `events_of(Kind.WAIT)`.
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
        events = rank.events_of(Kind.COLLECTIVE)
        begins, ends = clock.to_run_ns(events["begin_ns"]), clock.to_run_ns(events["end_ns"])
        columns = [begins.tolist(), ends.tolist()]  # an array's rows are slow to read
        columns += [events[field].tolist() for field in _FIELDS]
        mine = {}
        for begin, end, amount, step, name, group, sequence, peer in zip(*columns, strict=True):
            mine[rank.groups[group].name, sequence] = Arrival(
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
    """Return what the rank's wait events were for, in the order of `events_of(Kind.WAIT)`."""
    issued = list(mine.items())
    issues = [arrival.issue_ns for _, arrival in issued]
    starts = clock.to_run_ns(rank.events_of(Kind.BACKWARD)["begin_ns"]).tolist()
    waits = rank.events_of(Kind.WAIT)
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
            key = (rank.groups[group].name, sequence)
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


def lateness_s(trace: Trace, steps: int, met: Encounters | None = None) -> np.ndarray:
    """Return each rank's lateness in each step, shape (ranks, steps), seconds.

    A step may hold several times at which ranks synchronise; their latenesses add up, since after
    each of them all start equal. A step without a synchronising collective counts as 0.
    """
    met = met or encounters(trace)
    own = [
        _own_times_ns(mine, waits) for mine, waits in zip(met.arrivals, met.blocked, strict=True)
    ]
    result = np.zeros((len(own), steps))
    worst: dict[tuple[int, int, int], float] = {}  # by rank, step, stretch
    for key in met.meetings:
        present = [i for i, mine in enumerate(own) if key in mine]
        if len(present) < 2:
            continue
        fastest = min(own[i][key][0] for i in present)
        for i in present:
            own_ns, stretch = own[i][key]
            place = (i, met.arrivals[i][key].step, stretch)
            worst[place] = max(worst.get(place, 0.0), (own_ns - fastest) / 1e9)
    for (i, step, _), late in worst.items():
        if step < steps:
            result[i, step] += late
    return result


def _own_times_ns(mine: dict[Key, Arrival], waits: Sequence[Blocked]) -> dict[Key, tuple[int, int]]:
    """Return the rank's own time at each synchronising collective, and the stretch it is in.

    A stretch begins where the rank was last synchronised; before the first time there is none.
    """
    waits = sorted(waits, key=lambda wait: wait.begin_ns)
    own: dict[Key, tuple[int, int]] = {}
    reference = blocked_since = stretch = at = 0
    for key, arrival in mine.items():
        while at < len(waits) and waits[at].end_ns <= arrival.issue_ns:
            wait = waits[at]
            at += 1
            if wait.synchronises:
                reference, blocked_since, stretch = wait.end_ns, 0, stretch + 1
            else:
                blocked_since += wait.end_ns - wait.begin_ns
        if arrival.synchronises and stretch:
            own[key] = (arrival.issue_ns - reference - blocked_since, stretch)
    return own


def _segments(
    rank: RankTrace, first_ns: int, waits: tuple[Blocked, ...]
) -> list[tuple[int, int, float]]:
    """Return (step, phase, seconds) of each main-lane event without what is nested in it."""
    wait_at = dict(zip(rank.events_of(Kind.WAIT)["begin_ns"].tolist(), waits, strict=True))
    events = rank.events[rank.events["location"] == MAIN]
    events = events[np.isin(events["kind"], [*_PHASE_OF, Kind.WAIT])]
    events = events[events["begin_ns"] >= first_ns]
    events = events[np.lexsort((-events["end_ns"].astype(np.int64), events["begin_ns"]))]
    result = []
    stack: list[tuple[int, int]] = []  # (end, position in own)
    own: list[list[float]] = []  # [step, phase, nanoseconds]
    for begin, end, step, kind in zip(
        events["begin_ns"].tolist(),
        events["end_ns"].tolist(),
        events["step"].tolist(),
        events["kind"].tolist(),
        strict=True,
    ):
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if kind == Kind.WAIT:
            wait = wait_at[begin]
            waited = wait.ready_ns - wait.begin_ns
            moved = wait.end_ns - wait.ready_ns
            result.append((step, _WAITING, waited / 1e9))
            result.append((step, _TRANSFER, moved / 1e9))
            if stack:
                own[stack[-1][1]][2] -= waited + moved
            continue
        if stack:
            own[stack[-1][1]][2] -= end - begin
        stack.append((end, len(own)))
        own.append([step, _PHASE_OF[Kind(kind)], end - begin])
    result.extend((int(step), int(phase), max(0.0, ns) / 1e9) for step, phase, ns in own)
    return result


def phase_seconds(rank, waits):
    """Return seconds by step and phase, shape (steps, phases)."""
    begins, ends, _ = _step_bounds(rank)
    count = len(begins)
    seconds = np.zeros((count, len(PHASES)))
    for step, phase, amount_s in _segments(rank, int(begins[0]) if count else 0, waits):
        if step < count:
            seconds[step, phase] += amount_s
    seconds[:, _OTHER] = np.maximum(0.0, (ends - begins) / 1e9 - seconds.sum(axis=1))
    return seconds


def communication(trace: Trace, known: Encounters | None = None) -> tuple[Traffic, ...]:
    """Return the run's collectives by operation, group and size, the costliest first."""
    met: dict[Key, list[Arrival]] = {}
    for mine in known.arrivals if known else arrivals(trace):
        for key, arrival in mine.items():
            met.setdefault(key, []).append(arrival)
    classes: dict[tuple[str, str, int], list[list[Arrival]]] = {}
    for (group, _), present in met.items():
        largest = max(arrival.amount for arrival in present)
        place = (present[0].name, group, size_class_bytes(largest))
        classes.setdefault(place, []).append(present)
    found = [_traffic(*place, together) for place, together in classes.items()]
    return tuple(sorted(found, key=lambda operation: -operation.count * operation.transfer_s))


def size_class_bytes(amount: int) -> int:
    """Return the smallest power of two that holds `amount` bytes; 0 for none.

    >>> [size_class_bytes(amount) for amount in (0, 1, 4, 5)]
    [0, 1, 4, 8]
    """
    return 1 << (amount - 1).bit_length() if amount else 0


def _traffic(operation: str, group: str, size: int, together: list[list[Arrival]]) -> Traffic:
    amounts, transfers, spreads = [], [], []
    for present in together:
        last_ns = max(arrival.issue_ns for arrival in present)
        amounts.append(float(np.mean([arrival.amount for arrival in present])))
        transfers.append(max(0, max(arrival.complete_ns for arrival in present) - last_ns))
        spreads.append(last_ns - min(arrival.issue_ns for arrival in present))
    return Traffic(
        operation=operation,
        group=group,
        ranks=max(len(present) for present in together),
        size_class_bytes=size,
        count=len(together),
        bytes=round(sum(amounts)),
        typical_bytes=float(np.median(amounts)),
        transfer_s=float(np.median(transfers)) / 1e9,
        spread_s=float(np.median(spreads)) / 1e9,
    )
