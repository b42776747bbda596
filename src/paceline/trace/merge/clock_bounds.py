"""What the exchanges of a run say of its nodes' clocks: bounds of their offsets from the first's.

A run that is larger than memory gives its exchanges part by part (`merge.windows`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.merge.clock_pieces import fit_pieces
from paceline.trace.merge.clocks import ClockCorrection, upper_hull

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge.matches import Matches

# Bounds that are kept of a node for each direction. Of more, those are kept that a line can touch
# in a part of the run: about half of eight points.
_MOST_POINTS, _PART_POINTS = 1 << 15, 8


def fit_clocks(ranks: Sequence[RankTrace], matches: Matches) -> tuple[ClockCorrection, ...]:
    """Return the clock correction of each rank; the first rank's clock is the run's.

    Args:
        ranks: traces of a run, ordered by rank.
        matches: their matched collectives and messages, with times on each rank's own clock.
    """
    bounds = ClockBounds(ranks)
    bounds.add(matches)
    return bounds.fit([span_of_events(rank.events) for rank in ranks])


def span_of_events(events: np.ndarray) -> tuple[int, int] | None:
    """Return the first begin and the last end of a rank's events; None without events."""
    if not len(events):
        return None
    return int(events["begin_ns"].min()), int(events["end_ns"].max())


class ClockBounds:
    """What the exchanges of a run say of its nodes' clocks; given part by part, if it is large."""

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        """Make the bounds of the nodes on which `ranks`, in order, ran."""
        self._statuses = [rank.status for rank in ranks]
        self._nodes: dict[str, list[int]] = {}
        for index, rank in enumerate(ranks):
            self._nodes.setdefault(_node(rank), []).append(index)
        self._home = _node(ranks[0])
        empty = np.zeros((0, 2), dtype=np.int64)
        self._points = {node: (empty, empty) for node in self._nodes if node != self._home}

    @property
    def needed(self) -> bool:
        """Whether there is more than one clock."""
        return len(self._nodes) > 1

    def add(self, matches: Matches) -> None:
        """Take in matched collectives and messages, with times on each rank's own clock.

        Cost: sorts the times of the collectives and messages between the first node and others.
        """
        if not self.needed:
            return
        at_home = np.isin(np.arange(len(self._statuses)), self._nodes[self._home])
        lower, upper = _collective_bounds(matches, at_home)
        more = _message_bounds(matches, at_home)
        for node, (below, above) in self._points.items():
            members = self._nodes[node]
            found = []
            for side, known, parts in ((1, below, (lower, more[0])), (-1, above, (upper, more[1]))):
                points = [known]
                points += [rows[np.isin(traces, members)] for traces, rows in parts]
                found.append(_thinned(np.concatenate(points), side))
            self._points[node] = (found[0], found[1])

    def fit(self, spans: Sequence[tuple[int, int] | None]) -> tuple[ClockCorrection, ...]:
        """Return the clock correction of each rank.

        Args:
            spans: first and last time of each rank's events, from `span_of_events`.
        """
        by_node = {self._home: ClockCorrection()}
        for node, (below, above) in self._points.items():
            members = self._nodes[node]
            known = [span for span in (spans[index] for index in members) if span is not None]
            if not len(below) or not len(above):  # only the wall clocks are left
                by_node[node] = self._by_wall_clock(members[0])
                continue
            span = (min(begin for begin, _ in known), max(end for _, end in known))
            by_node[node] = fit_pieces(below, above, span)
        order = {index: node for node, members in self._nodes.items() for index in members}
        return tuple(by_node[order[index]] for index in range(len(self._statuses)))

    def _by_wall_clock(self, member: int) -> ClockCorrection:
        """Return the difference of wall clocks, whose error is unknown."""
        first, here = self._statuses[member], self._statuses[0]
        offset_ns = (first.opened_realtime_ns - first.opened_monotonic_ns) - (
            here.opened_realtime_ns - here.opened_monotonic_ns
        )
        return ClockCorrection(offset_ns=offset_ns, error_ns=None)


def _node(rank: RankTrace) -> str:
    return rank.status.boot_id or f"unknown node of rank {rank.rank}"


# Traces, and for each a time on its clock and a bound of the clock's offset then, (points, 2).
_Bounds = tuple[np.ndarray, np.ndarray]


def _collective_bounds(matches: Matches, at_home: np.ndarray) -> tuple[_Bounds, _Bounds]:
    """Return lower and upper bounds, from the synchronising collectives of home and other ranks."""
    calls = matches.calls
    rows = np.flatnonzero(matches.synchronising())
    own = rows[at_home[calls["trace"][rows]]]
    limits = np.iinfo(np.int64)
    entered_ns = np.full(len(matches.instances), limits.min)
    left_ns = np.full(len(matches.instances), limits.max)
    np.maximum.at(entered_ns, calls["instance"][own], calls["enter_ns"][own])
    np.minimum.at(left_ns, calls["instance"][own], calls["exit_ns"][own])
    theirs = rows[~at_home[calls["trace"][rows]]]
    theirs = theirs[entered_ns[calls["instance"][theirs]] != limits.min]
    calls = calls[theirs]
    return (
        _bounds(calls["trace"], calls["exit_ns"], entered_ns[calls["instance"]]),
        _bounds(calls["trace"], calls["enter_ns"], left_ns[calls["instance"]]),
    )


def _message_bounds(matches: Matches, at_home: np.ndarray) -> tuple[_Bounds, _Bounds]:
    """Return lower and upper bounds, from the messages between home and other ranks."""
    messages = matches.messages
    rows = np.flatnonzero(messages["sends"] & (messages["partner"] >= 0))
    sent, received = messages[rows], messages[messages["partner"][rows]]
    from_home, to_home = at_home[sent["trace"]], at_home[received["trace"]]
    out = from_home & ~to_home & received["timed"]
    back = ~from_home & to_home & received["timed"]
    return (
        _bounds(received["trace"][out], received["exit_ns"][out], sent["enter_ns"][out]),
        _bounds(sent["trace"][back], sent["enter_ns"][back], received["exit_ns"][back]),
    )


def _bounds(traces: np.ndarray, times_ns: np.ndarray, home_ns: np.ndarray) -> _Bounds:
    return traces, np.stack([times_ns, home_ns - times_ns], axis=1)


def _thinned(points: np.ndarray, side: int) -> np.ndarray:
    """Return the points, or of too many those that a line can touch in parts of the run.

    Args:
        points: lower bounds (`side` 1), or upper ones (-1).
        side: which.
    """
    if len(points) <= _MOST_POINTS:
        return points
    points = points[np.argsort(points[:, 0], kind="stable")]
    parts = np.array_split(points, _MOST_POINTS // _PART_POINTS)
    kept = [upper_hull(part[:, 0], side * part[:, 1]) * np.array([1, side]) for part in parts]
    return np.asarray(np.concatenate(kept))
