"""Corrects the clocks of a run's nodes to one clock.

Ranks of one node share CLOCK_MONOTONIC, recognised by the kernel's boot id. Between nodes a clock
differs by a linear function of time: an offset, and a drift of some parts per million, which is a
tenth of a second per hour. Both follow from the collectives: no rank leaves a synchronising
collective before all ranks have entered it, so for each such collective and two ranks a and b

    issue_a <= run(completion_b)     and     run(issue_b) <= completion_a

with run(t) = t + offset + drift (t - at): points below and points above the line. The chosen line
keeps a vertical distance from both kinds of points: among the drifts that leave nine tenths of the
largest distance it has the smallest drift, since a short run tells little about drift. Every line
between the points could be the true line, so the error is the largest distance to any such line
over the node's events: about the duration of the fastest collectives. If no line separates the
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
    nodes: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        nodes.setdefault(_node(rank), []).append(index)
    home = _node(ranks[0])
    synchronising = matches.synchronising() if len(nodes) > 1 else np.zeros(0, dtype=bool)
    by_node = {
        node: ClockCorrection()
        if node == home
        else _node_clock(ranks, members, matches, synchronising)
        for node, members in nodes.items()
    }
    return tuple(by_node[_node(rank)] for rank in ranks)


def _node(rank: RankTrace) -> str:
    return rank.status.boot_id or f"unknown node of rank {rank.rank}"


def _node_clock(
    ranks: Sequence[RankTrace], members: list[int], matches: Matches, synchronising: np.ndarray
) -> ClockCorrection:
    """Return the clock of a node, from the collectives that its ranks shared with the first rank.

    Args:
        ranks: traces of a run, ordered by rank.
        members: indices in `ranks` of the traces of this node.
        matches: the matched collectives and messages of `ranks`.
        synchronising: mask over calls, from `Matches.synchronising`.
    """
    calls = matches.calls
    of_first = np.full(len(matches.instances), -1, dtype=np.int64)
    own = np.flatnonzero(synchronising & (calls["trace"] == 0))
    of_first[calls["instance"][own]] = own
    theirs = np.flatnonzero(synchronising & np.isin(calls["trace"], members))
    ours = of_first[calls["instance"][theirs]]
    theirs, ours = theirs[ours >= 0], ours[ours >= 0]
    if not len(theirs):  # only the wall clocks are left, whose error is unknown
        first, here = ranks[members[0]].status, ranks[0].status
        offset_ns = (first.opened_realtime_ns - first.opened_monotonic_ns) - (
            here.opened_realtime_ns - here.opened_monotonic_ns
        )
        return ClockCorrection(offset_ns=offset_ns, error_ns=None)
    enter_a, exit_a = calls["enter_ns"][ours], calls["exit_ns"][ours]
    enter_b, exit_b = calls["enter_ns"][theirs], calls["exit_ns"][theirs]
    events = [ranks[index].events for index in members if len(ranks[index].events)]
    span = (
        int(min(table["begin_ns"].min() for table in events)),
        int(max(table["end_ns"].max() for table in events)),
    )
    return fit_clock((exit_b, enter_a - exit_b), (enter_b, exit_a - enter_b), span)


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
        hull = _hull(points[0] - at_ns, side * (points[1] - base_ns))
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
    """Return the upper convex hull of points, by x, as floats: no other point can touch a line.

    Source: A. M. Andrew, Another efficient algorithm for convex hulls in two dimensions (1979).
    """
    order = np.lexsort((y, x))
    hull: list[tuple[int, int]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        while len(hull) > 1 and _turn(hull[-2], hull[-1], point) >= 0:
            hull.pop()
        hull.append(point)
    return np.array(hull, dtype=np.float64)


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
