"""Decides from samples of the ranks whether one of them hangs: a pure state machine, without I/O.

    samples of all ranks -> observe -> a verdict; or a rank that is busy; which ranks to look at

A rank *waits* while it has entered a collective and not left it, or waits for a message. Those who
have not entered that collective are *missing*. A missing rank that waits itself is a consequence,
and what it waits for leads on. One that does not wait hangs if it showed no sign of work for the
deadline, counted from when others began to wait for it: no time on a core or runnable, no bytes
read or written, no wake-ups of its main thread, no other stack, no event. A checkpoint, a compiler
or a loader shows such signs, however long it takes: then the rank is *busy*, and is not accused.

What a rank does inside a wait is no work: an MPI polls. A sequence number at which ranks have
entered different collectives is a verdict by itself, as is a circle of ranks that wait for each
other.

A loop that waits for a batch is missed by itself, also where no other rank waits: a worker of its
loader may be blocked. That it is busy is not reported: a batch takes as long as it takes.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

GroupKey = tuple[str, tuple[int, ...]]  # a group's name, and its members' global ranks

# Signs of work per second. A rank that is blocked has threads of Paceline's and torch's that wake
# now and then; its main thread does not.
_BUSY_SHARE = 0.05  # of a core, summed over the rank's processes
_BUSY_BYTES = 32_768  # the recorder reads 7 KiB a second about its own process
_BUSY_SWITCHES = 2.0  # a loop that looks for a loader's workers wakes every 5 s
# A launcher that did not run for this time, or a quarter of the deadline, does not know what was
# quiet meanwhile: the whole job was stopped, or the machine slept.
_GAP_S = 5.0
_EXAMINE_S = 1.0  # how long others wait for a rank before anything is asked of it
MESSAGE: GroupKey = ("", ())  # in place of a group, of a wait for a message
INPUT: GroupKey = ("input", ())  # of a wait for a batch
_LOOP = -1  # in place of the rank that waits for a batch: the rank itself is missed


class HangKind(StrEnum):
    """What is wrong with the rank that the others wait for."""

    BLOCKED = "blocked"  # in a lock, in input or output, in a wait that nobody ends
    STOPPED = "stopped"  # by SIGSTOP, or a frozen container
    GONE = "gone"  # it has left its loop, or ended, without a word
    MISMATCHED = "mismatched"  # it is in another collective than the others
    CIRCLE = "circle"  # it waits for ranks that wait for it


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """A rank's place in the sequence of a group's collectives.

    Attributes:
        entered: sequence of the last one that it entered.
        left: number of those that have ended.
        unseen: sequence of the last one whose completion is not seen.
        names: of the last ones, by sequence.
    """

    entered: int
    left: int
    unseen: int = 0
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether one was entered that may not have ended."""
        return self.left < self.entered or 0 < self.unseen == self.entered


@dataclass(frozen=True, kw_only=True, slots=True)
class MessagePlace:
    """A rank's wait for a message.

    Attributes:
        count: of the waits so far.
        is_open: whether it waits.
        peer: global rank of the other side; negative if it is not known.
        name: ``send`` or ``recv``.
    """

    count: int
    is_open: bool
    peer: int
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signs:
    """What the operating system says of a rank's processes: totals since they began.

    Attributes:
        state: of the main process, a letter of proc(5); empty if it has ended.
        cpu_ns: time of all threads on cores, and of the main thread runnable without one.
        io_bytes: read and written, without what the recorder wrote.
        switches: how often the main thread went to sleep.
        stack: of the main thread, where it was asked for; else empty.
    """

    state: str
    cpu_ns: int = 0
    io_bytes: int = 0
    switches: int = 0
    stack: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSample:
    """What is known of a rank at a moment.

    Attributes:
        events: that it recorded so far.
        step: that it is in.
        in_wait: whether it is in a call that waits for other ranks.
        in_input: whether its loop waits for a batch.
        lost_child: which process that it had started was killed in this step, and how; or empty.
        closed: whether it has closed its trace.
        groups: its place in each group that it has used.
        has_all_groups: whether a group that is not there was not used.
        message: its wait for a message; None if it never had one.
        signs: None unless they were asked for, or it is not on this node.
    """

    events: int = 0
    step: int = 0
    in_wait: bool = False
    in_input: bool = False
    lost_child: str = ""
    closed: bool = False
    groups: Mapping[GroupKey, GroupPlace] = field(default_factory=dict)
    has_all_groups: bool = True
    message: MessagePlace | None = None
    signs: Signs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A rank that hangs, or that keeps others waiting while it works.

    Attributes:
        rank: the global rank.
        kind: what is wrong with it; None for a rank that is busy.
        waiting: the ranks that wait for it; none where its own loop waits for a batch.
        group: of the collective that they wait in; `MESSAGE` of a message, `INPUT` of a batch.
        sequence: of that collective; of messages, their count.
        name: of that collective or message.
        own_name: of the collective that the rank is in instead; else empty.
        waited_s: how long they have waited.
    """

    rank: int
    kind: HangKind | None
    waiting: tuple[int, ...]
    group: GroupKey
    sequence: int
    name: str
    own_name: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HangFinding:
    """What an observation leads to.

    Attributes:
        hang: the verdict; None if nothing hangs, as far as is known.
        busy: a rank that keeps others waiting beyond the deadline and works; once for each wait.
        examine: ranks whose next sample must have signs.
        stacks: those of them whose signs must have a stack.
    """

    hang: Verdict | None = None
    busy: Verdict | None = None
    examine: frozenset[int] = frozenset()
    stacks: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Wait:
    """A rank that waits: for whom, and since when."""

    rank: int
    group: GroupKey
    sequence: int
    name: str
    since_s: float
    missing: frozenset[int]


@dataclass(slots=True)
class _Known:
    """What the observations so far say of a rank."""

    sample: RankSample
    moved_s: dict[GroupKey, float] = field(default_factory=dict)  # when its place last changed
    quiet_s: float | None = None  # since when it shows no sign of work; None: was not looked at
    signs: Signs | None = None
    at_s: float = 0.0  # of `signs`
    stack: str = ""
    has_worked: bool = False  # since it was first looked at


def _loop_waits(sample: RankSample) -> bool:
    """Return whether a rank's own loop may wait: for a batch, or for what a lost process owed."""
    return sample.in_input or bool(sample.lost_child)


class HangDetector:
    """Finds the rank that hangs.

    Args:
        deadline_s: how long others wait for a rank that shows no sign of work.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._known: dict[int, _Known] = {}
        self._last_s = 0.0
        self._told: set[tuple[int, GroupKey, int]] = set()

    def observe(self, samples: Mapping[int, RankSample], now_s: float) -> HangFinding:
        """Return what the samples of this moment, by global rank, lead to."""
        if now_s - self._last_s > max(_GAP_S, self.deadline_s / 4):
            self._known.clear()
        self._last_s = now_s
        for rank, sample in samples.items():
            self._note(rank, sample, now_s)
        waits = self._waits(now_s, min(_EXAMINE_S, self.deadline_s / 4))
        long = [wait for wait in waits if now_s - wait.since_s >= self.deadline_s]
        missing = {rank for wait in waits for rank in wait.missing}
        for rank, known in self._known.items():
            if rank not in missing:
                known.quiet_s, known.signs, known.stack = None, None, ""
                known.has_worked = False
            elif known.quiet_s is None:
                known.quiet_s = now_s
        mismatch = self._mismatch(long, now_s)
        if mismatch is not None:
            return HangFinding(hang=mismatch)
        return self._judge(long, frozenset(missing), now_s)

    def _note(self, rank: int, sample: RankSample, now_s: float) -> None:
        """Note what has changed at a rank since the last observation."""
        known = self._known.get(rank)
        if known is None:
            places = dict.fromkeys([*sample.groups, MESSAGE, INPUT], now_s)
            self._known[rank] = _Known(sample=sample, moved_s=places)
            return
        before = known.sample
        moved = before.step != sample.step or before.closed != sample.closed
        for group in {*before.groups, *sample.groups}:
            if before.groups.get(group) != sample.groups.get(group):
                known.moved_s[group], moved = now_s, True
        if before.message != sample.message:
            known.moved_s[MESSAGE], moved = now_s, True
        if moved or _loop_waits(before) != _loop_waits(sample):
            known.moved_s[INPUT] = now_s
        known.sample = sample
        if sample.signs is not None:
            stands_still = sample.in_wait and before.in_wait and before.events == sample.events
            moved = self._works(known, sample.signs, now_s, stands_still=stands_still) or moved
            # Writing a stack is work, too: it must not be taken for the rank's.
            known.stack = sample.signs.stack or known.stack
            known.signs = None if sample.signs.stack else sample.signs
            known.at_s = now_s
        if moved and known.quiet_s is not None:
            known.quiet_s, known.stack, known.has_worked = now_s, "", True

    def _works(self, known: _Known, signs: Signs, now_s: float, *, stands_still: bool) -> bool:
        """Return whether a rank has worked since its signs were last taken."""
        if signs.state == "t":  # a debugger holds it
            return True
        before, seconds = known.signs, now_s - known.at_s
        if signs.stack:
            return known.stack not in ("", signs.stack)
        if before is None or seconds <= 0 or stands_still:
            return False
        return (
            signs.cpu_ns - before.cpu_ns > _BUSY_SHARE * 1e9 * seconds
            or signs.io_bytes - before.io_bytes > _BUSY_BYTES * seconds
            or signs.switches - before.switches > _BUSY_SWITCHES * seconds
        )

    def _waits(self, now_s: float, least_s: float) -> list[_Wait]:
        """Return the waits that have lasted for `least_s`."""
        waits = []
        for rank, known in self._known.items():
            sample = known.sample
            if sample.closed:
                continue
            for group, place in sample.groups.items():
                since_s = known.moved_s.get(group, now_s)
                if place.is_open and now_s - since_s >= least_s:
                    name = place.names.get(place.entered, "")
                    missing = self._missing(group, place.entered)
                    waits.append(_Wait(rank, group, place.entered, name, since_s, missing))
            message = sample.message
            since_s = known.moved_s.get(MESSAGE, now_s)
            if message is not None and message.is_open and now_s - since_s >= least_s:
                missing = frozenset({message.peer} & self._known.keys())
                waits.append(_Wait(rank, MESSAGE, message.count, message.name, since_s, missing))
            since_s = known.moved_s[INPUT]
            # Without a deadline, after the run: a rank that ended amid its input is missed by none.
            if self.deadline_s and _loop_waits(sample) and now_s - since_s >= least_s:
                waits.append(_Wait(_LOOP, INPUT, sample.step, "", since_s, frozenset({rank})))
        return waits

    def _missing(self, group: GroupKey, sequence: int) -> frozenset[int]:
        """Return the members of a group that have not entered its collective number `sequence`."""
        missing = set()
        for rank in group[1] or self._known:
            known = self._known.get(rank)
            if known is None:
                continue
            place = known.sample.groups.get(group)
            if place is None and not known.sample.has_all_groups:
                continue
            if place is None or place.entered < sequence:
                missing.add(rank)
        return frozenset(missing)

    def _mismatch(self, waits: Iterable[_Wait], now_s: float) -> Verdict | None:
        """Return the verdict on a sequence at which ranks have entered different collectives."""
        for wait in waits:
            if wait.group in (MESSAGE, INPUT):
                continue
            place = self._known[wait.rank].sample.groups[wait.group]
            for sequence in range(place.left + 1, place.entered + 1):
                names = self._names_at(wait.group, sequence)
                if len(set(names.values())) < 2:
                    continue
                odd = odd_rank(names, _history(place, sequence))
                others = tuple(rank for rank in sorted(names) if names[rank] != names[odd])
                return Verdict(
                    rank=odd,
                    kind=HangKind.MISMATCHED,
                    waiting=others,
                    group=wait.group,
                    sequence=sequence,
                    name=names[others[0]],
                    own_name=names[odd],
                    waited_s=now_s - wait.since_s,
                )
        return None

    def mismatched_rank(self) -> int | None:
        """Return the rank that entered another collective than others, at any known sequence."""
        groups = {group for known in self._known.values() for group in known.sample.groups}
        for group in sorted(groups):
            places = [
                known.sample.groups[group]
                for known in self._known.values()
                if group in known.sample.groups
            ]
            for sequence in sorted({number for place in places for number in place.names}):
                names = self._names_at(group, sequence)
                if len(set(names.values())) > 1:
                    return odd_rank(names, _history(places[0], sequence))
        return None

    def _names_at(self, group: GroupKey, sequence: int) -> dict[int, str]:
        """Return which collective each rank has entered at a sequence, where that is known."""
        names = {}
        for rank, known in self._known.items():
            place = known.sample.groups.get(group)
            if place is not None and place.entered >= sequence and place.names.get(sequence):
                names[rank] = place.names[sequence]
        return names

    def _judge(self, waits: list[_Wait], missing: frozenset[int], now_s: float) -> HangFinding:
        """Return the verdict on the ranks that are missing in waits beyond the deadline."""
        waiting = {wait.rank for wait in waits}
        blamed = collections.Counter(rank for wait in waits for rank in wait.missing)
        order = sorted(blamed, key=lambda rank: (-blamed[rank], rank))
        roots = [rank for rank in order if rank not in waiting]
        half = {
            rank
            for rank in missing - waiting
            if self._quiet_s(rank, now_s) >= self.deadline_s / 2 and self._lacks_stack(rank)
        }
        busy, stacks = None, set(half)
        for rank in roots:
            kind = self._kind(rank, now_s)
            wait = self._longest(rank, waits)
            if kind is None:
                key = (rank, wait.group, wait.sequence)
                if wait.group != INPUT and self._known[rank].has_worked and key not in self._told:
                    self._told.add(key)
                    busy = self._verdict(rank, None, waits, now_s)
                continue
            signs = self._known[rank].sample.signs
            if kind is HangKind.BLOCKED and (signs is None or not signs.stack):
                stacks.add(rank)  # what it does now, against what it did at half time
                continue
            hang = self._verdict(rank, kind, waits, now_s)
            return HangFinding(hang=hang, examine=missing)
        if (
            not roots
            and order
            and all(any(wait.missing for wait in waits if wait.rank == rank) for rank in order)
        ):
            # The ranks that are blamed all wait for others: the last in order closes the circle.
            most = [rank for rank in order if blamed[rank] == blamed[order[0]]]
            hang = self._verdict(most[-1], HangKind.CIRCLE, waits, now_s)
            return HangFinding(hang=hang, examine=missing)
        return HangFinding(busy=busy, examine=missing, stacks=frozenset(stacks))

    def _lacks_stack(self, rank: int) -> bool:
        """Return whether a rank's stack was not taken yet, and can be; a stopped one stays so."""
        known = self._known[rank]
        signs = known.sample.signs
        return not known.stack and signs is not None and signs.state not in ("", "Z", "X", "T")

    def _kind(self, rank: int, now_s: float) -> HangKind | None:
        """Return what is wrong with a missing rank that does not wait; None if it is busy."""
        sample = self._known[rank].sample
        signs = sample.signs
        if sample.closed or (signs is not None and signs.state in ("", "Z", "X")):
            return HangKind.GONE
        if signs is None or self._quiet_s(rank, now_s) < self.deadline_s:
            return None
        return HangKind.STOPPED if signs.state == "T" else HangKind.BLOCKED

    def _quiet_s(self, rank: int, now_s: float) -> float:
        """Return for how long a rank has shown no sign of work while others wait for it."""
        since_s = self._known[rank].quiet_s
        return 0.0 if since_s is None else now_s - since_s

    @staticmethod
    def _longest(rank: int, waits: list[_Wait]) -> _Wait:
        """Return the longest wait for a rank: of others, or else of its own loop."""
        own = [wait for wait in waits if rank in wait.missing]
        return min(own, key=lambda wait: (wait.group == INPUT, wait.since_s))

    def _verdict(
        self, rank: int, kind: HangKind | None, waits: list[_Wait], now_s: float
    ) -> Verdict:
        longest = self._longest(rank, waits)
        if longest.group == INPUT:  # others may have begun to wait for the rank since
            waits = self._waits(now_s, 0.0)
            longest = self._longest(rank, waits)
        ranks = {
            wait.rank
            for wait in waits
            if rank in wait.missing
            and (wait.group, wait.sequence) == (longest.group, longest.sequence)
        } - {_LOOP}
        return Verdict(
            rank=rank,
            kind=kind,
            waiting=tuple(sorted(ranks)),
            group=longest.group,
            sequence=longest.sequence,
            name=longest.name,
            waited_s=now_s - longest.since_s,
        )


def odd_rank(names: Mapping[int, str], history: list[str]) -> int:
    """Return the rank whose collective is not the one that was to come.

    It is one of the fewest. Among as many it is one whose collective did not follow the last ones
    before, as far as they repeat.

    Args:
        names: of the collective that each rank has entered at a sequence; not all are the same.
        history: the names before that sequence, which all ranks had in common.
    """
    counts = collections.Counter(names.values())
    fewest = min(counts.values())
    odd = {name for name, count in counts.items() if count == fewest}
    if len(odd) > 1:
        odd -= {_next_name(history)} & odd
    return max(rank for rank, name in names.items() if name in odd)


def _history(place: GroupPlace, sequence: int) -> list[str]:
    """Return the names of the collectives before a sequence; empty where they are not known."""
    return [place.names.get(sequence - back, "") for back in range(7, 0, -1)]


def _next_name(history: list[str]) -> str:
    """Return the name that followed the last names of a history when they came before."""
    for length in (2, 1):
        tail = history[-length:]
        for at in range(len(history) - length - 1, -1, -1):
            if all(tail) and history[at : at + length] == tail:
                return history[at + length]
    return ""
