"""Brings the times of matched calls onto the run's clock, and derives the times of instances.

A correction has an error, so that a message may seem to arrive before it was sent, or a rank to
leave a synchronising collective before ranks of another node have entered. Such a completion is
moved to the moment before which it cannot have been, and counted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import ROOTED
from paceline.trace.merge.matches import NO_TIME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.merge.clocks import ClockCorrection
    from paceline.trace.merge.matches import Matches


@dataclass(frozen=True, kw_only=True, slots=True)
class Violations(Record):
    """What contradicted causality after the correction of clocks, and was repaired.

    Attributes:
        messages: number of messages that seemed to arrive before they were sent.
        collectives: number of synchronising collectives that a rank seemed to leave before all
            had entered.
        largest_ns: by how much at most, nanoseconds.
    """

    messages: int = 0
    collectives: int = 0
    largest_ns: int = 0

    def __add__(self, other: Violations) -> Violations:
        return Violations(
            messages=self.messages + other.messages,
            collectives=self.collectives + other.collectives,
            largest_ns=max(self.largest_ns, other.largest_ns),
        )


def on_run_clock(matches: Matches, clocks: Sequence[ClockCorrection]) -> tuple[Matches, Violations]:
    """Return the matches with all times on the run's clock, and what contradicted causality.

    The matches have the times of their instances, and none contradicts causality any more.

    Args:
        matches: matched collectives and messages, with times on each rank's own clock.
        clocks: clock correction of each trace.
    """
    calls = _corrected(matches.calls, matches.call_starts, clocks)
    messages = _corrected(matches.messages, matches.message_starts, clocks)
    moved = _timed(dataclasses.replace(matches, calls=calls, messages=messages))
    late_ns = _early_receives(moved), _early_exits(moved, clocks)
    if not (late_ns[0].any() or late_ns[1].any()):
        return moved, Violations()
    messages, calls = moved.messages.copy(), moved.calls.copy()
    messages["exit_ns"] += late_ns[0]
    calls["exit_ns"] += late_ns[1]
    repaired = _timed(dataclasses.replace(moved, calls=calls, messages=messages))
    return repaired, Violations(
        messages=int((late_ns[0] > 0).sum()),
        collectives=len(np.unique(calls["instance"][late_ns[1] > 0])),
        largest_ns=max(int(late.max(initial=0)) for late in late_ns),
    )


def _early_receives(matches: Matches) -> np.ndarray:
    """Return by how much each message ends before its other side sent it, shape (messages,)."""
    messages = matches.messages
    rows = np.flatnonzero(~messages["sends"] & (messages["partner"] >= 0) & messages["timed"])
    sent_ns = messages["enter_ns"][messages["partner"][rows]]
    found = np.zeros(len(messages), dtype=np.int64)
    found[rows] = np.maximum(0, sent_ns - messages["exit_ns"][rows])
    return found


def _early_exits(matches: Matches, clocks: Sequence[ClockCorrection]) -> np.ndarray:
    """Return by how much each call ends before its last rank entered, shape (calls,).

    That is an error of clocks only if these ranks have different ones, and a line fits both.
    """
    calls = matches.calls
    found = np.zeros(len(calls), dtype=np.int64)
    known = np.array([clock.error_ns is not None for clock in clocks], dtype=bool)
    distinct = list(dict.fromkeys(clocks))
    numbers = np.array([distinct.index(clock) for clock in clocks])
    if len(distinct) < 2 or not len(calls):
        return found
    latest = np.lexsort((calls["enter_ns"], calls["instance"]))[matches.instance_starts[1:] - 1]
    rows = np.flatnonzero(matches.synchronising())
    own, last = calls["trace"][rows], calls["trace"][latest[calls["instance"][rows]]]
    rows = rows[(numbers[own] != numbers[last]) & known[own] & known[last]]
    last_ns = matches.instances["last_ns"][calls["instance"][rows]]
    found[rows] = np.maximum(0, last_ns - calls["exit_ns"][rows])
    return found


def _timed(matches: Matches) -> Matches:
    """Return the matches with the times of their instances, from calls on the run's clock."""
    instances = matches.instances.copy()
    if not len(instances):
        return matches
    calls, first = matches.calls[matches.by_instance], matches.instance_starts[:-1]
    instances["first_ns"] = np.minimum.reduceat(calls["enter_ns"], first)
    instances["last_ns"] = np.maximum.reduceat(calls["enter_ns"], first)
    instances["complete_ns"] = np.maximum.reduceat(calls["exit_ns"], first)
    instances["largest"] = np.maximum.reduceat(calls["amount"], first)
    instances["mean"] = np.add.reduceat(calls["amount"], first) / instances["ranks"]
    instances["timed"] = np.logical_and.reduceat(calls["timed"], first)
    instances["root_ns"] = NO_TIME
    roots = np.flatnonzero(
        (matches.ranks[calls["trace"]] == calls["peer"]) & matches.are(ROOTED)[calls["operation"]]
    )
    instances["root_ns"][calls["instance"][roots]] = calls["enter_ns"][roots]
    return dataclasses.replace(matches, instances=instances)


def _corrected(
    rows: np.ndarray, starts: np.ndarray, clocks: Sequence[ClockCorrection]
) -> np.ndarray:
    if all(clock.is_identity for clock in clocks):
        return rows
    corrected = rows.copy()
    for trace_index, clock in enumerate(clocks):
        own = slice(int(starts[trace_index]), int(starts[trace_index + 1]))
        for field in ("enter_ns", "exit_ns"):
            corrected[field][own] = clock.to_run_ns(rows[field][own])
    return corrected
