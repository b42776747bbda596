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
    from paceline.trace.efficiency.window import StepWindow


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


class OverlapSum:
    """Adds up the communication of a run, window by window, in any order."""

    def __init__(self, ranks: np.ndarray) -> None:
        """Begin with nothing.

        Args:
            ranks: the global rank of each trace, shape (traces,).
        """
        self._ranks = ranks
        self._moving_ns, self._exposed_ns, self._untimed = np.zeros((3, len(ranks)), np.int64)

    def add(self, window: StepWindow) -> None:
        """Add the communication in a window's steps."""
        for trace_index in range(len(self._ranks)):
            begins_ns, ends_ns, untimed_count = _moving(window, trace_index)
            waits = window.waits[trace_index]
            exposed_ns = _within(ends_ns, waits) - _within(begins_ns, waits)
            self._moving_ns[trace_index] += (ends_ns - begins_ns).sum()
            self._exposed_ns[trace_index] += exposed_ns.sum()
            self._untimed[trace_index] += untimed_count

    def result(self) -> tuple[RankOverlap, ...]:
        """Return the overlap of communication and compute of each rank that left a trace."""
        return tuple(
            RankOverlap(
                rank=int(rank),
                moving_s=float(self._moving_ns[i]) / 1e9,
                exposed_s=float(self._exposed_ns[i]) / 1e9,
                untimed_count=int(self._untimed[i]),
            )
            for i, rank in enumerate(self._ranks.tolist())
        )


def _moving(window: StepWindow, trace_index: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return when data of a rank moved, and how many calls are left out, in a window's steps.

    That is begins and ends of disjoint intervals, in order.
    """
    matches = window.matches
    calls = matches.calls[matches.calls_of(trace_index)]
    instances = matches.instances[calls["instance"]]
    timed = calls["timed"] & instances["agrees"]
    messages = matches.messages[matches.messages_of(trace_index)]
    known = messages["partner"] != NONE
    untimed_count = int((~calls["timed"] & window.inside(calls["step"])).sum())
    untimed_count += int((~known & window.inside(messages["step"])).sum())
    messages = messages[known]
    others = matches.messages[messages["partner"]]
    begins_ns = np.concatenate(
        [instances["last_ns"][timed], np.maximum(messages["enter_ns"], others["enter_ns"])]
    )
    ends_ns = np.concatenate([calls["exit_ns"][timed], messages["exit_ns"]])
    first_ns, stop_ns = window.bounds_ns(trace_index)
    begins_ns, ends_ns = np.maximum(begins_ns, first_ns), np.minimum(ends_ns, stop_ns)
    return (*_union(begins_ns, ends_ns), untimed_count)


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
