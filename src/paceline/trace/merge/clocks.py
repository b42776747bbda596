"""Corrects the clocks of a run's nodes to one clock.

Ranks of one node share CLOCK_MONOTONIC, recognised by the kernel's boot id. Between nodes a clock
differs by a linear function of time: an offset, and a drift of some parts per million, which is a
tenth of a second per hour. Both follow from what ranks exchange, from the first exchange of the run
to its last: no rank leaves a synchronising collective before all ranks have entered it, and no
message arrives before it was sent. So for each such collective and ranks a of the first rank's node
and b of another

    issue_a <= run(completion_b)     and     run(issue_b) <= completion_a

and for a message from a to b the first, for one from b to a the second, with
run(t) = t + offset + drift (t - at): points below and points above the line. The chosen line keeps
a vertical distance from both kinds of points: among the drifts that leave nine tenths of the
largest distance it has the smallest drift, since a short run tells little about drift. Every line
between the points could be the true line, so the error is the largest distance to any such line
over the node's events: about the duration of the fastest exchanges. If no line separates the
points, the clock was set or slewed during the run: the chosen line then contradicts the points as
little as possible, and its error is unknown.

Source: the same inequality as in D. L. Mills, RFC 5905 (NTP), with a collective as the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge.matches import Matches

# The limit of clock_adjtime(2) for slewing a clock; a crystal alone is off by a tenth of it.
MAX_DRIFT = 500e-6
_HALVINGS = 96  # each leaves two thirds: 1e-3 becomes 1e-20, below a nanosecond in a year
_KEPT_GAP = 0.9

T = TypeVar("T", int, np.ndarray)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockCorrection:
    """Converts a rank's times to the run's clock, which is the clock of the first rank.

    Attributes:
        offset_ns: offset that is added to the time `at_ns`.
        drift: nanoseconds that are added in addition per nanosecond since `at_ns`.
        at_ns: reference time on the rank's own clock.
        error_ns: largest error of a time on the run's clock; None if the error is not known.
    """

    offset_ns: int = 0
    drift: float = 0.0
    at_ns: int = 0
    error_ns: int | None = 0

    @property
    def is_identity(self) -> bool:
        """Whether the rank's clock is the run's clock."""
        return not self.offset_ns and not self.drift

    def to_run_ns(self, times_ns: T) -> T:
        """Return times of the rank, an integer or an array of them, on the run's clock."""
        if isinstance(times_ns, np.ndarray):
            signed = times_ns.astype(np.int64)
            if not self.drift:
                return signed + self.offset_ns
            more = np.rint(self.drift * (signed - self.at_ns)).astype(np.int64)
            return np.asarray(signed + self.offset_ns + more)
        return times_ns + self.offset_ns + round(self.drift * (times_ns - self.at_ns))


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
                joined = np.concatenate(points)
                found.append(_kept(joined, side) if len(joined) else joined)
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
            by_node[node] = fit_clock((below[:, 0], below[:, 1]), (above[:, 0], above[:, 1]), span)
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


def _kept(points: np.ndarray, side: int) -> np.ndarray:
    """Return the points that a line can touch: lower bounds (`side` 1), or upper ones (-1)."""
    hull = _hull(points[:, 0], side * points[:, 1])
    return np.asarray(hull * np.array([1, side]))


def fit_clock(
    below: tuple[np.ndarray, np.ndarray],
    above: tuple[np.ndarray, np.ndarray],
    span: tuple[int, int],
) -> ClockCorrection:
    """Return the clock whose line runs between points, as far as possible from both kinds.

    Args:
        below: times on the clock, and offsets that are lower bounds of the true offsets then.
        above: times on the clock, and offsets that are upper bounds of the true offsets then.
        span: first and last time for which the clock is used.
    Cost: sorts the points, then evaluates their hulls a constant number of times.
    """
    at_ns, base_ns = int(below[0].min()), int(below[1][0])

    def relative(points: tuple[np.ndarray, np.ndarray], side: int) -> tuple[np.ndarray, np.ndarray]:
        hull = _hull(points[0] - at_ns, side * (points[1] - base_ns)).astype(np.float64)
        return hull[:, 0], side * hull[:, 1]

    (low_x, low_y), (high_x, high_y) = relative(below, 1), relative(above, -1)

    def lowest(drift: float, x: float = 0.0) -> float:
        return float((low_y - drift * (low_x - x)).max())

    def highest(drift: float, x: float = 0.0) -> float:
        return float((high_y - drift * (high_x - x)).min())

    def gap(drift: float) -> float:  # concave: a minimum of lines minus a maximum of lines
        return highest(drift) - lowest(drift)

    drift = _peak(gap, -MAX_DRIFT, MAX_DRIFT)
    best = gap(drift)
    if best > 0:
        drift = _edge(lambda d: gap(d) - _KEPT_GAP * best, drift, 0.0)
    middle = (lowest(drift) + highest(drift)) / 2
    error_ns = None
    if gap(drift) >= 0:
        least, most = _edge(gap, drift, -MAX_DRIFT), _edge(gap, drift, MAX_DRIFT)
        worst = 0.0
        for x in (float(span[0] - at_ns), float(span[1] - at_ns)):
            here = middle + drift * x
            up = highest(_peak(lambda d, x=x: highest(d, x), least, most), x)  # type: ignore[misc]
            down = lowest(_peak(lambda d, x=x: -lowest(d, x), least, most), x)  # type: ignore[misc]
            worst = max(worst, up - here, here - down)
        error_ns = int(np.ceil(worst)) + 1  # and one for rounding
    return ClockCorrection(
        offset_ns=base_ns + round(middle), drift=drift, at_ns=at_ns, error_ns=error_ns
    )


def _hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the upper convex hull of points, by x: no other point can touch a line above them.

    Source: A. M. Andrew, Another efficient algorithm for convex hulls in two dimensions (1979).
    """
    order = np.lexsort((y, x))
    hull: list[tuple[int, int]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        while len(hull) > 1 and _turn(hull[-2], hull[-1], point) >= 0:
            hull.pop()
        hull.append(point)
    return np.array(hull, dtype=np.int64)


def _turn(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _peak(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a concave function is largest between two values."""
    for _ in range(_HALVINGS):
        third = (high - low) / 3
        if function(low + third) < function(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


def _edge(gap: Callable[[float], float], inside: float, outside: float) -> float:
    """Return the value between `inside` and `outside` up to which the gap is not negative."""
    if gap(outside) >= 0:
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if gap(middle) >= 0:
            inside = middle
        else:
            outside = middle
    return outside
