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
points, the clock was set or slewed during the run: several lines do, one after the other
(`clock_pieces`). With too few exchanges for that, the chosen line contradicts the points as little
as possible, and its error is unknown.

Source: the same inequality as in D. L. Mills, RFC 5905 (NTP), with a collective as the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

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
        later: what holds from later times on, where no single line fits, in order of time.
    """

    offset_ns: int = 0
    drift: float = 0.0
    at_ns: int = 0
    error_ns: int | None = 0
    later: tuple[ClockPiece, ...] = ()

    @property
    def is_identity(self) -> bool:
        """Whether the rank's clock is the run's clock."""
        return not self.offset_ns and not self.drift and not self.later

    def to_run_ns(self, times_ns: T) -> T:
        """Return times of the rank, an integer or an array of them, on the run's clock."""
        if isinstance(times_ns, np.ndarray):
            signed = times_ns.astype(np.int64)
            found = _on_line(self, signed)
            for piece in self.later:
                since = signed >= piece.from_ns
                moved = _on_line(piece, signed[since])
                found[since] = np.maximum(moved, piece.not_before_ns)
            return found
        line: ClockCorrection | ClockPiece = self
        least_ns: int | None = None
        for piece in self.later:
            if times_ns >= piece.from_ns:
                line, least_ns = piece, piece.not_before_ns
        found_ns = times_ns + line.offset_ns + round(line.drift * (times_ns - line.at_ns))
        return found_ns if least_ns is None else max(found_ns, least_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockPiece:
    """Converts times of a rank to the run's clock from a moment on, as `ClockCorrection` does.

    Attributes:
        from_ns: from this time on the rank's own clock.
        offset_ns: offset that is added to the time `at_ns`.
        drift: nanoseconds that are added in addition per nanosecond since `at_ns`.
        at_ns: reference time on the rank's own clock.
        not_before_ns: time on the run's clock that no later time precedes.
    """

    from_ns: int
    offset_ns: int
    drift: float
    at_ns: int
    not_before_ns: int


def _on_line(line: ClockCorrection | ClockPiece, times_ns: np.ndarray) -> np.ndarray:
    moved = times_ns + line.offset_ns
    if line.drift:
        moved += np.rint(line.drift * (times_ns - line.at_ns)).astype(np.int64)
    return moved


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
    corridor = _Corridor(below, above)
    at_ns, base_ns = corridor.at_ns, corridor.base_ns
    lowest, highest, gap = corridor.lowest, corridor.highest, corridor.gap
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


def is_separable(below: np.ndarray, above: np.ndarray) -> bool:
    """Return whether a line runs between points, given as `clock_pieces.fit_pieces` has them.

    How far bounds are apart at a drift is a concave function of it: its tangent where they overlap
    rules out all drifts on one side, up to where the tangent is 0.
    Cost: a few passes over the points.
    """
    if not len(below) or not len(above):
        return True
    at_ns, base_ns = below[0]
    low_x, low_y = (below - (at_ns, base_ns)).astype(np.float64).T
    high_x, high_y = (above - (at_ns, base_ns)).astype(np.float64).T
    least, most = -MAX_DRIFT, MAX_DRIFT
    for _ in range(_HALVINGS):
        drift = (least + most) / 2
        low, high = low_y - drift * low_x, high_y - drift * high_x
        lowest, highest = int(low.argmax()), int(high.argmin())
        gap, slope = high[highest] - low[lowest], low_x[lowest] - high_x[highest]
        if gap >= 0:
            return True
        if slope > 0:
            least = max(least, drift - gap / slope)
        elif slope < 0:
            most = min(most, drift - gap / slope)
        if slope == 0 or least > most:
            return False
    return False  # bounds touch at best


class _Corridor:
    """What is between lower and upper bounds of an offset, relative to one of them.

    Attributes:
        at_ns, base_ns: the time and the offset from which others are counted.
    """

    def __init__(
        self, below: tuple[np.ndarray, np.ndarray], above: tuple[np.ndarray, np.ndarray]
    ) -> None:
        self.at_ns, self.base_ns = int(below[0].min()), int(below[1][0])
        self._low = self._relative(below, 1)
        self._high = self._relative(above, -1)

    def _relative(
        self, points: tuple[np.ndarray, np.ndarray], side: int
    ) -> tuple[np.ndarray, np.ndarray]:
        hull = upper_hull(points[0] - self.at_ns, side * (points[1] - self.base_ns)).astype(
            np.float64
        )
        return hull[:, 0], side * hull[:, 1]

    def lowest(self, drift: float, x: float = 0.0) -> float:
        """Return the least offset at time `x` of a line with a drift that is above its bounds."""
        times, offsets = self._low
        return float((offsets - drift * (times - x)).max())

    def highest(self, drift: float, x: float = 0.0) -> float:
        """Return the largest offset at time `x` of a line that is below its bounds."""
        times, offsets = self._high
        return float((offsets - drift * (times - x)).min())

    def gap(self, drift: float) -> float:
        """Return how far bounds are apart; concave: a minimum of lines minus a maximum of lines."""
        return self.highest(drift) - self.lowest(drift)


def upper_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
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
