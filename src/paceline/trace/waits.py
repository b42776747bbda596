"""Wait intervals: when a rank's main thread could do nothing but wait, for whom, and until when.

A wait has two parts. Until the ranks have entered that this rank depends on, nothing can move
(`waiting`). From then on data moves, and no computing hides it (exposed communication). Whom a rank
depends on follows from the operation:

    all_reduce, all_gather, ...       all ranks, and completion tells that they have entered
    broadcast, scatter                the root; the root itself on nobody
    reduce, gather                    all ranks, at the root; elsewhere nobody
    recv                              its sender; send: nobody

A rank that depends on nobody may go on before the other side has entered, or not, as the backend
likes: it waited for the other side only if that had entered when it went on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.events import DRAIN, RECV, SEND, SYNCHRONISING, TO_ROOT, Kind
from paceline.trace.keys import collective_keys, row_ids
from paceline.trace.matches import NO_TIME, NONE

if TYPE_CHECKING:
    from paceline.trace.matches import Matches
    from paceline.trace.merge import Trace

# Times on the run's clock. A drain ends when its data was there; what is done later is not waiting.
WAIT_INTERVAL = np.dtype(
    [
        ("begin_ns", "<i8"),
        ("ready_ns", "<i8"),  # when those had entered on whom the rank depends
        ("end_ns", "<i8"),
        ("synchronises", "?"),  # whether it ends with the knowledge that all ranks have entered
    ]
)


def wait_intervals(trace: Trace) -> tuple[np.ndarray, ...]:
    """Return each rank's waits, of `WAIT_INTERVAL`, in the order of `of(Kind.WAIT)`."""
    synchronising = trace.matches.synchronising()
    return tuple(
        _RankWaits(trace, index, synchronising).find() for index in range(len(trace.ranks))
    )


class _RankWaits:
    """The waits of one rank."""

    def __init__(self, trace: Trace, index: int, synchronising: np.ndarray) -> None:
        self.rank = trace.ranks[index]
        self.clock = trace.clocks[index]
        self.matches: Matches = trace.matches
        self.local_groups = self.matches.local_groups[index]
        self.calls = self.matches.calls[self.matches.calls_of(index)]
        self.synchronising = synchronising[self.matches.calls_of(index)]
        self.messages = self.matches.messages[self.matches.messages_of(index)]
        self.events = self.rank.of(Kind.WAIT)
        self.found = np.zeros(len(self.events), WAIT_INTERVAL)

    def find(self) -> np.ndarray:
        found, events = self.found, self.events
        found["begin_ns"] = self.clock.to_run_ns(events["begin_ns"])
        found["end_ns"] = self.clock.to_run_ns(events["end_ns"])
        found["ready_ns"] = found["begin_ns"]
        if len(events):
            drains, messages = self._named(DRAIN), self._named(SEND, RECV)
            self._find_drains(np.flatnonzero(drains))
            self._find_messages(np.flatnonzero(messages))
            self._find_collectives(np.flatnonzero(~drains & ~messages))
        np.clip(found["ready_ns"], found["begin_ns"], found["end_ns"], out=found["ready_ns"])
        return found

    def _named(self, *names: str) -> np.ndarray:
        numbers = [self.rank.names.index(name) for name in names if name in self.rank.names]
        return np.isin(self.events["name"], numbers)

    def _find_collectives(self, waits: np.ndarray) -> None:
        """Fill in the waits, by their rows, for one collective each."""
        own = collective_keys(self.calls["group"], self.calls["sequence"])
        events = self.events[waits]
        wanted = collective_keys(self.local_groups[events["group"]], events["sequence"])
        order = np.argsort(own, kind="stable")
        places = np.searchsorted(own[order], wanted)
        known = places < len(own)
        known[known] = own[order[places[known]]] == wanted[known]
        waits, calls = waits[known], order[places[known]]
        instances = self.matches.instances[self.calls["instance"][calls]]
        self.found["synchronises"][waits] = self.synchronising[calls]
        ready_ns = self._ready_ns(self.calls[calls], instances, self.found["end_ns"][waits])
        usable = instances["agrees"] & (ready_ns != NO_TIME)
        self.found["ready_ns"][waits[usable]] = ready_ns[usable]

    def _ready_ns(self, calls: np.ndarray, instances: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Return when those had entered on whom each call depends; `NO_TIME` for on nobody."""
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
        """Fill in the waits, by their rows, for one send or receive each."""
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
        partners = np.where(messages == NONE, NONE, own["partner"][messages])
        waits, sends, partners = (column[partners != NONE] for column in (waits, sends, partners))
        entered_ns = self.matches.messages["enter_ns"][partners]
        depends = ~sends | (entered_ns <= self.found["end_ns"][waits])
        self.found["ready_ns"][waits[depends]] = entered_ns[depends]

    def _find_drains(self, waits: np.ndarray) -> None:
        """Fill in the waits at the end of backward passes, for what was issued within them.

        What completed later was not waited for here: the script holds its work and waits elsewhere.
        """
        found, calls = self.found, self.calls
        begins = np.sort(self.clock.to_run_ns(self.rank.of(Kind.BACKWARD)["begin_ns"]))
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
        # Where completion was not seen, the whole drain may have been needed for it.
        complete_ns = np.where(
            calls["timed"][issued], calls["exit_ns"][issued], found["end_ns"][waits][drain]
        )
        end_ns = found["begin_ns"][waits].copy()
        np.maximum.at(end_ns, drain, complete_ns)
        common = self.synchronising[issued]
        ready_ns = found["begin_ns"][waits].copy()
        last_ns = self.matches.instances["last_ns"][calls["instance"][issued]]
        np.maximum.at(ready_ns, drain[common], last_ns[common])
        found["end_ns"][waits], found["ready_ns"][waits] = end_ns, ready_ns
        found["synchronises"][waits[drain[common]]] = True
