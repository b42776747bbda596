"""On whom each wait depended: the wait states of Scalasca, one row per wait and what it was for.

    wait at NxN      all-reduce, all-gather, barrier, ...: each rank waits for the last one
    late broadcast   broadcast, scatter: a rank waits for the root
    early reduce     reduce, gather: the root waits for the last rank
    late sender      a receiver waits for the sender
    late receiver    a sender, the root of a broadcast, or a rank that gives to a root, waits for
                     the other side

Which operation depends on whom is that of `analysis.waits`.
Source: F. Wolf and B. Mohr, Automatic performance analysis of hybrid MPI/OpenMP applications
(2003), section 4; M. Geimer and others, The Scalasca performance toolset architecture (2010).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import ROOTED, SYNCHRONISING, TO_ROOT
from paceline.trace.merge.matches import NO_TIME, NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.merge.matches import Matches


class WaitState(IntEnum):
    """Why a rank waited."""

    WAIT_AT_NXN = 0
    LATE_BROADCAST = 1
    EARLY_REDUCE = 2
    LATE_SENDER = 3
    LATE_RECEIVER = 4

    @property
    def label(self) -> str:
        """The state as people say it."""
        return _LABELS[self]


_LABELS = {
    WaitState.WAIT_AT_NXN: "wait at NxN",
    WaitState.LATE_BROADCAST: "late broadcast",
    WaitState.EARLY_REDUCE: "early reduce",
    WaitState.LATE_SENDER: "late sender",
    WaitState.LATE_RECEIVER: "late receiver",
}

# `trace` and `wait` say which wait: the rank's index among those that left a trace, and the row in
# its waits. The last rank on which it depends, `late`, entered at `entered_ns`, the rank itself at
# `own_ns`; `complete_ns` is when the data were there, at most the end of the wait. `whole`: it
# depends on all ranks of `instance`, and `call` is the last of them to enter; else on `call`, or on
# `message`, alone. `operation` is an index of `Matches.operations`, or for messages of the two
# names that follow.
DEPENDENCY = np.dtype(
    [
        ("wait", "<i8"),
        ("instance", "<i8"),
        ("call", "<i8"),
        ("message", "<i8"),
        ("entered_ns", "<i8"),
        ("own_ns", "<i8"),
        ("complete_ns", "<i8"),
        ("trace", "<i4"),
        ("late", "<i4"),
        ("operation", "<i4"),
        ("group", "<i4"),
        ("state", "i1"),
        ("whole", "?"),
    ]
)


def wait_dependencies(
    matches: Matches, waits: Sequence[np.ndarray], awaited: Sequence[np.ndarray]
) -> np.ndarray:
    """Return an array of `DEPENDENCY`, ordered by trace and wait.

    Waits that depend on no rank have no row, a drain has one for each collective. Collectives on
    which ranks do not agree are left out.

    Args:
        matches: the matched collectives and messages.
        waits: one array of `WAIT_INTERVAL` per rank.
        awaited: one array of `AWAITED` per rank.
    """
    last_calls, root_calls = _last_calls(matches), _root_calls(matches)
    found = [np.zeros(0, DEPENDENCY)]
    for trace_index, (own, calls) in enumerate(zip(waits, awaited, strict=True)):
        for rows in (
            _on_collectives(matches, trace_index, own, calls, last_calls, root_calls),
            _on_messages(matches, own),
        ):
            rows["trace"] = trace_index
            found.append(rows)
    rows = np.concatenate(found)
    return np.asarray(rows[np.lexsort((rows["wait"], rows["trace"]))])


def binding(dependencies: np.ndarray) -> np.ndarray:
    """Return the row of each wait's last dependency: the one that was entered last."""
    order = np.lexsort((dependencies["entered_ns"], dependencies["wait"], dependencies["trace"]))
    rows = dependencies[order]
    last = np.ones(len(rows), dtype=bool)
    last[:-1] = (rows["wait"][1:] != rows["wait"][:-1]) | (rows["trace"][1:] != rows["trace"][:-1])
    return np.asarray(rows[last])


def _last_calls(matches: Matches) -> np.ndarray:
    """Return the row of the call that entered last of each instance, shape (instances,)."""
    calls = matches.calls
    order = np.lexsort((calls["enter_ns"], calls["instance"]))
    ends = np.searchsorted(calls["instance"][order], np.arange(len(matches.instances)), "right")
    return np.asarray(order[ends - 1]) if len(order) else np.zeros(0, dtype=np.int64)


def _root_calls(matches: Matches) -> np.ndarray:
    """Return the row of the root's call of each instance, `NONE` without one."""
    calls = matches.calls
    rooted = matches.are(ROOTED)[calls["operation"]]
    rows = np.flatnonzero(rooted & (matches.ranks[calls["trace"]] == calls["peer"]))
    found = np.full(len(matches.instances), NONE, dtype=np.int64)
    found[calls["instance"][rows]] = rows
    return found


def _on_collectives(
    matches: Matches,
    trace_index: int,
    waits: np.ndarray,
    awaited: np.ndarray,
    last_calls: np.ndarray,
    root_calls: np.ndarray,
) -> np.ndarray:
    calls = matches.calls[awaited["call"]]
    instances = matches.instances[calls["instance"]]
    end_ns = waits["end_ns"][awaited["wait"]]
    synchronises = matches.are(SYNCHRONISING)[calls["operation"]]
    to_root = matches.are(TO_ROOT)[calls["operation"]]
    root_ns = instances["root_ns"]
    root_known = root_ns != NO_TIME
    is_root = root_known & (calls["peer"] == matches.ranks[trace_index])
    on_all = synchronises | (is_root & (to_root | (instances["last_ns"] <= end_ns)))
    on_root = ~synchronises & root_known & ~is_root & (~to_root | (root_ns <= end_ns))
    chosen = np.flatnonzero((on_all | on_root) & instances["agrees"])
    whole = on_all[chosen]
    rows = np.zeros(len(chosen), DEPENDENCY)
    rows["wait"], rows["whole"] = awaited["wait"][chosen], whole
    rows["instance"] = calls["instance"][chosen]
    rows["call"] = np.where(whole, last_calls[rows["instance"]], root_calls[rows["instance"]])
    rows["message"] = NONE
    late = matches.calls[rows["call"]]
    rows["entered_ns"], rows["late"] = late["enter_ns"], late["trace"]
    rows["own_ns"] = calls["enter_ns"][chosen]
    complete_ns = np.where(calls["timed"], calls["exit_ns"], end_ns)
    rows["complete_ns"] = np.minimum(complete_ns, end_ns)[chosen]
    rows["operation"], rows["group"] = calls["operation"][chosen], calls["group"][chosen]
    rows["state"] = np.select(
        [synchronises, is_root & to_root, ~is_root & ~to_root],
        [WaitState.WAIT_AT_NXN, WaitState.EARLY_REDUCE, WaitState.LATE_BROADCAST],
        WaitState.LATE_RECEIVER,
    )[chosen]
    return rows


def _on_messages(matches: Matches, waits: np.ndarray) -> np.ndarray:
    own = np.flatnonzero(waits["message"] != NONE)
    messages = matches.messages[waits["message"][own]]
    known = messages["partner"] != NONE
    own, messages = own[known], messages[known]
    others = matches.messages[messages["partner"]]
    depends = ~messages["sends"] | (others["enter_ns"] <= waits["end_ns"][own])
    own, messages, others = own[depends], messages[depends], others[depends]
    rows = np.zeros(len(own), DEPENDENCY)
    rows["wait"], rows["instance"], rows["call"] = own, NONE, NONE
    rows["message"] = messages["partner"]
    rows["entered_ns"], rows["late"] = others["enter_ns"], others["trace"]
    rows["own_ns"], rows["complete_ns"] = waits["begin_ns"][own], waits["end_ns"][own]
    rows["group"] = messages["group"]
    rows["operation"] = len(matches.operations) + np.where(messages["sends"], 0, 1)
    rows["state"] = np.where(messages["sends"], WaitState.LATE_RECEIVER, WaitState.LATE_SENDER)
    return rows
