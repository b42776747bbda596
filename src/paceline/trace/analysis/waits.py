"""Wait intervals: when a rank's main thread was blocked, for which ranks, and until when.

A wait has two parts. Until all ranks on which this rank depends have entered, no data can move
(`waiting`). After that data moves, and no computation hides it (exposed communication). The
operation determines on which ranks a rank depends:

    all_reduce, all_gather, ...   on all ranks; completion shows that all of them have entered
    broadcast, scatter            the root on no rank, the other ranks on the root
    reduce, gather                the root on all ranks, the other ranks on no rank
    recv                          on the sender
    send                          on no rank

For a rank that depends on no rank (the root of a broadcast, a sender), the backend decides whether
the call blocks until the other side has entered. The trace does not record this. So the rank
is assumed to have waited for the other side if that had entered by the end of the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import (
    DRAIN,
    RECV,
    SEND,
    SYNCHRONISING,
    TO_ROOT,
    WAIT_ALL,
    Kind,
)
from paceline.trace.merge.keys import collective_keys, row_ids
from paceline.trace.merge.matches import NO_TIME, NONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.trace.merge import Trace
    from paceline.trace.merge.matches import Matches

# Times are on the run's clock. A "drain" is the wait at the end of a backward pass for the
# collectives that were issued in it (DDP's buckets). Its `end_ns` is when the last of these
# collectives completed; later work at the end of the pass is not waiting.
WAIT_INTERVAL = np.dtype(
    [
        ("begin_ns", "<i8"),
        ("ready_ns", "<i8"),  # when the last rank on which this rank depends had entered
        ("end_ns", "<i8"),
        ("synchronises", "?"),  # whether its end shows that all ranks have entered
        ("message", "<i8"),  # row of the message that it is for in `Matches.messages`, or `NONE`
    ]
)
# A collective that a wait was for: rows of the rank's waits and of `Matches.calls`. A drain, or a
# wait for several requests, was for several.
AWAITED = np.dtype([("wait", "<i8"), ("call", "<i8")])
_AS_LATE = 0.05  # of a wait: what entered at most so much before the last is as late


def wait_intervals(trace: Trace) -> tuple[np.ndarray, ...]:
    """Return one array of `WAIT_INTERVAL` per rank: a row per WAIT event, ordered by begin time."""
    return tuple(found for found, _ in _by_rank(trace))


def awaited_calls(trace: Trace) -> tuple[np.ndarray, ...]:
    """Return one array of `AWAITED` per rank: the collectives that each of its waits was for."""
    return tuple(awaited for _, awaited in _by_rank(trace))


def waits_and_calls(trace: Trace) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return both `wait_intervals` and `awaited_calls`, at the cost of one of them."""
    both = list(_by_rank(trace))
    return tuple(found for found, _ in both), tuple(awaited for _, awaited in both)


def _by_rank(trace: Trace) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    synchronising = trace.matches.synchronising()
    for trace_index in range(len(trace.ranks)):
        waits = _RankWaits(trace, trace_index, synchronising)
        found = waits.find()
        yield found, np.concatenate(waits.awaited)


class _RankWaits:
    """Computes the wait intervals of one rank, which is given by the index of its trace."""

    def __init__(self, trace: Trace, trace_index: int, synchronising: np.ndarray) -> None:
        self.trace_index = trace_index
        self.rank = trace.ranks[trace_index]
        self.clock = trace.clocks[trace_index]
        self.matches: Matches = trace.matches
        self.local_groups = self.matches.local_groups[trace_index]
        self.calls = self.matches.calls[self.matches.calls_of(trace_index)]
        self.synchronising = synchronising[self.matches.calls_of(trace_index)]
        self.first_message = self.matches.messages_of(trace_index).start
        self.messages = self.matches.messages[self.matches.messages_of(trace_index)]
        self.events = self.rank.events_of(Kind.WAIT)
        self.found = np.zeros(len(self.events), WAIT_INTERVAL)
        self.awaited = [np.zeros(0, AWAITED)]

    def find(self) -> np.ndarray:
        found, events = self.found, self.events
        found["begin_ns"] = self.clock.to_run_ns(events["begin_ns"])
        found["end_ns"] = self.clock.to_run_ns(events["end_ns"])
        found["ready_ns"] = found["begin_ns"]
        found["message"] = NONE
        if len(events):
            drains, messages = self._named(DRAIN), self._named(SEND, RECV)
            several = self._named(WAIT_ALL)
            self._find_drains(np.flatnonzero(drains))
            self._find_messages(np.flatnonzero(messages))
            self._find_several(np.flatnonzero(several))
            self._find_collectives(np.flatnonzero(~drains & ~messages & ~several))
        np.clip(found["ready_ns"], found["begin_ns"], found["end_ns"], out=found["ready_ns"])
        return found

    def _named(self, *names: str) -> np.ndarray:
        numbers = [self.rank.names.index(name) for name in names if name in self.rank.names]
        return np.isin(self.events["name"], numbers)

    def _find_collectives(self, waits: np.ndarray) -> None:
        """Fill in the rows `waits` of `found`: each is a wait for one collective."""
        own = collective_keys(self.calls["group"], self.calls["sequence"])
        events = self.events[waits]
        wanted = collective_keys(self.local_groups[events["group"]], events["sequence"])
        order = np.argsort(own, kind="stable")
        places = np.searchsorted(own[order], wanted)
        known = places < len(own)
        known[known] = own[order[places[known]]] == wanted[known]
        waits, calls = waits[known], order[places[known]]
        self._add_awaited(waits, calls)
        instances = self.matches.instances[self.calls["instance"][calls]]
        self.found["synchronises"][waits] = self.synchronising[calls]
        ready_ns = self._ready_ns(self.calls[calls], instances, self.found["end_ns"][waits])
        usable = instances["agrees"] & (ready_ns != NO_TIME)
        self.found["ready_ns"][waits[usable]] = ready_ns[usable]

    def _ready_ns(self, calls: np.ndarray, instances: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Return, for each call, when the last rank on which it depends had entered.

        `NO_TIME` if the call waited for no rank, or if that time is not known.
        """
        last_ns, root_ns = instances["last_ns"], instances["root_ns"]
        root_known = root_ns != NO_TIME
        is_root = root_known & (calls["peer"] == self.rank.rank)
        to_root = self.matches.are(TO_ROOT)[calls["operation"]]
        other_ns = np.where(is_root, last_ns, root_ns)
        came = root_known & (other_ns <= end_ns)
        one_way = np.where(
            root_known & ~is_root & ~to_root, root_ns, np.where(came, other_ns, NO_TIME)
        )
        synchronises = self.matches.are(SYNCHRONISING)[calls["operation"]]
        on_all = synchronises | (is_root & to_root)
        return np.where(on_all, last_ns, one_way)

    def _find_messages(self, waits: np.ndarray) -> None:
        """Fill in the rows `waits` of `found`: each is a wait for one send or receive."""
        if not len(waits) or not len(self.messages):
            return
        events, own = self.events[waits], self.messages
        sends = self._named(SEND)[waits]
        both = [
            np.concatenate([own["sends"], sends]),
            np.concatenate([own["group"], self.local_groups[events["group"]]]),
            *(
                np.concatenate([own[field], events[field].astype(np.int64)])
                for field in ("peer", "tag", "sequence")
            ),
        ]
        ids = row_ids(*both)
        message_of = np.full(int(ids.max()) + 1, NONE)
        message_of[ids[: len(own)]] = np.arange(len(own))
        messages = message_of[ids[len(own) :]]
        known = messages != NONE
        self.found["message"][waits[known]] = self.first_message + messages[known]
        partners = np.where(messages == NONE, NONE, own["partner"][messages])
        waits, sends, partners = (column[partners != NONE] for column in (waits, sends, partners))
        entered_ns = self.matches.messages["enter_ns"][partners]
        depends = ~sends | (entered_ns <= self.found["end_ns"][waits])
        self.found["ready_ns"][waits[depends]] = entered_ns[depends]

    def _find_several(self, waits: np.ndarray) -> None:
        """Fill in the rows `waits` of `found`: each is for all that ended at its own end.

        It is ready when the last rank on which any of these depends had entered. Its message is
        the one whose other side entered last, be it before the wait began; a receive, if the other
        side of one came about as late.
        """
        if not len(waits):
            return
        found, ends = self.found, self.found["end_ns"][waits]
        order = np.argsort(ends)

        def wait_of(exit_ns: np.ndarray) -> np.ndarray:
            places = np.minimum(np.searchsorted(ends[order], exit_ns), len(ends) - 1)
            candidates = order[places]
            return np.where(ends[candidates] == exit_ns, waits[candidates], NONE)

        own = wait_of(self.calls["exit_ns"])
        calls, rows = np.flatnonzero(own != NONE), own[own != NONE]
        self._add_awaited(rows, calls)
        instances = self.matches.instances[self.calls["instance"][calls]]
        ready_ns = self._ready_ns(self.calls[calls], instances, found["end_ns"][rows])
        usable = instances["agrees"] & (ready_ns != NO_TIME)
        np.maximum.at(found["ready_ns"], rows[usable], ready_ns[usable])
        found["synchronises"][rows[self.synchronising[calls]]] = True

        own = wait_of(self.messages["exit_ns"])
        partners = self.messages["partner"]
        messages = np.flatnonzero((own != NONE) & (partners != NONE))
        rows, partners = own[messages], partners[messages]
        entered_ns = self.matches.messages["enter_ns"][partners]
        sends = self.messages["sends"][messages]
        depends = ~sends | (entered_ns <= found["end_ns"][rows])
        rows, messages, entered_ns = rows[depends], messages[depends], entered_ns[depends]
        np.maximum.at(found["ready_ns"], rows, entered_ns)
        latest_ns = np.full(len(found), np.iinfo(np.int64).min)
        np.maximum.at(latest_ns, rows, entered_ns)
        waited_ns = np.maximum(0, latest_ns - found["begin_ns"])
        last = entered_ns >= latest_ns[rows] - _AS_LATE * waited_ns[rows]
        # A receive cannot end before its message was sent; that a send waited is an assumption.
        receives = last & ~self.messages["sends"][messages]
        for chosen in (last, receives):
            found["message"][rows[chosen]] = self.first_message + messages[chosen]

    def _find_drains(self, waits: np.ndarray) -> None:
        """Fill in the rows `waits` of `found`: drains, for the collectives of a backward pass.

        A collective that completed later was not waited for here: the script holds its `Work`
        handle and waits elsewhere.
        """
        found, calls = self.found, self.calls
        begins = np.sort(self.clock.to_run_ns(self.rank.events_of(Kind.BACKWARD)["begin_ns"]))
        opened = np.searchsorted(begins, found["begin_ns"][waits], side="right") - 1
        since = begins[np.maximum(opened, 0)] if len(begins) else np.zeros(len(waits), np.int64)
        issues = calls["enter_ns"]
        last = np.searchsorted(issues, found["end_ns"][waits], side="right")
        first = np.where(opened >= 0, np.searchsorted(issues, since, side="left"), last)
        counts = np.maximum(0, last - first)
        drain = np.repeat(np.arange(len(waits)), counts)
        begin = np.cumsum(counts) - counts
        issued = np.arange(len(drain)) - np.repeat(begin, counts) + np.repeat(first, counts)
        awaited = calls["exit_ns"][issued] <= found["end_ns"][waits][drain]
        drain, issued = drain[awaited], issued[awaited]
        self._add_awaited(waits[drain], issued)
        # A collective whose completion was not seen may have needed the whole drain.
        complete_ns = np.where(
            calls["timed"][issued], calls["exit_ns"][issued], found["end_ns"][waits][drain]
        )
        end_ns = found["begin_ns"][waits].copy()
        np.maximum.at(end_ns, drain, complete_ns)
        is_synchronising = self.synchronising[issued]
        ready_ns = found["begin_ns"][waits].copy()
        last_ns = self.matches.instances["last_ns"][calls["instance"][issued]]
        np.maximum.at(ready_ns, drain[is_synchronising], last_ns[is_synchronising])
        found["end_ns"][waits], found["ready_ns"][waits] = end_ns, ready_ns
        found["synchronises"][waits[drain[is_synchronising]]] = True

    def _add_awaited(self, waits: np.ndarray, calls: np.ndarray) -> None:
        """Keep that the rows `waits` of `found` were for the rows `calls` of the rank's calls."""
        rows = np.zeros(len(waits), AWAITED)
        rows["wait"] = waits
        rows["call"] = calls + self.matches.calls_of(self.trace_index).start
        self.awaited.append(rows)
