"""Overlap of communication and compute: how much of the time that data move, ranks compute.

Data of a collective move from its last rank's entry to the rank's completion, those of a message
from when both sides have entered. While the main thread waits for them, communication is exposed;
the rest is hidden behind computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.merge.matches import NONE

if TYPE_CHECKING:
    from paceline.trace.analysis import Analysis


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOverlap(Record):
    """One rank's communication, and how much of it computing hides.

    Attributes:
        rank: the global rank.
        moving_s: time during which data of the rank's collectives or messages moved.
        exposed_s: the part of it during which the rank's main thread waited for them.
        untimed_count: collectives and messages that are left out: their completion was not seen.
    """

    rank: int
    moving_s: float
    exposed_s: float
    untimed_count: int

    @property
    def hidden_share(self) -> float | None:
        """The share of the communication that computing hides; None without communication."""
        return 1 - self.exposed_s / self.moving_s if self.moving_s > 0 else None


def communication_overlap(analysis: Analysis) -> tuple[RankOverlap, ...]:
    """Return the overlap of communication and compute of each rank that left a trace."""
    return tuple(_of_rank(analysis, i) for i in range(len(analysis.trace.ranks)))


def _of_rank(analysis: Analysis, trace_index: int) -> RankOverlap:
    matches = analysis.matches
    calls = matches.calls[matches.calls_of(trace_index)]
    instances = matches.instances[calls["instance"]]
    timed = calls["timed"] & instances["agrees"]
    messages = matches.messages[matches.messages_of(trace_index)]
    known = messages["partner"] != NONE
    messages, unmatched = messages[known], int((~known).sum())
    others = matches.messages[messages["partner"]]
    begins_ns = np.concatenate(
        [instances["last_ns"][timed], np.maximum(messages["enter_ns"], others["enter_ns"])]
    )
    ends_ns = np.concatenate([calls["exit_ns"][timed], messages["exit_ns"]])
    begins_ns, ends_ns = _union(begins_ns, ends_ns)
    waits = analysis.waits[trace_index]
    exposed_ns = _within(ends_ns, waits) - _within(begins_ns, waits)
    return RankOverlap(
        rank=int(matches.ranks[trace_index]),
        moving_s=float((ends_ns - begins_ns).sum()) / 1e9,
        exposed_s=float(exposed_ns.sum()) / 1e9,
        untimed_count=int((~calls["timed"]).sum()) + unmatched,
    )


def _union(begins_ns: np.ndarray, ends_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the union of intervals as begins and ends of disjoint ones, in order."""
    lasting = ends_ns > begins_ns
    begins_ns, ends_ns = begins_ns[lasting], ends_ns[lasting]
    if not len(begins_ns):
        return begins_ns, ends_ns
    order = np.argsort(begins_ns, kind="stable")
    begins_ns, ends_ns = begins_ns[order], np.maximum.accumulate(ends_ns[order])
    first = np.concatenate([[True], begins_ns[1:] > ends_ns[:-1]])
    return begins_ns[first], ends_ns[np.concatenate([first[1:], [True]])]


def _within(times_ns: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """Return how long the waits before each time were exposed: data moved, the thread waited."""
    begins_ns, ends_ns = _union(waits["ready_ns"], waits["end_ns"])
    if not len(begins_ns):
        return np.zeros(len(times_ns), dtype=np.int64)
    sums_ns = np.concatenate([[0], np.cumsum(ends_ns - begins_ns)])
    at = np.searchsorted(begins_ns, times_ns, side="right")
    last = np.maximum(at - 1, 0)
    over_ns = np.where(at > 0, np.maximum(0, ends_ns[last] - times_ns), 0)
    return np.asarray(sums_ns[at] - over_ns)
