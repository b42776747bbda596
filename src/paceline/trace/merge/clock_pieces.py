"""Corrects a clock that no single line fits: it was set, or its drift changed, during the run.

A run of hours meets warm and cold rooms, NTP that slews a clock, hosts that are suspended. Then no
line runs between all lower and upper bounds of the clock's offset (`clocks`), but a few lines do,
one after the other::

    offset  |        ____        forward: each piece as long as a line fits, from the first exchange
            |   ____/            backward: the same from the last one
            |__/                 the change is between the backward and the forward end
            +--------------- time

Pieces are as few as possible. Where both lines of a change agree within their errors, the drift has
changed: they are joined by a knot, so that time goes on without a jump. Else the clock was set.
A line that contradicts nothing is not improved on: without contradictions there is one piece.

Source: the greedy partition into fewest pieces is H. Imai and M. Iri, An optimal algorithm for
approximating a piecewise linear function (1986).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.merge.clocks import ClockCorrection, ClockPiece, fit_clock, is_separable

if TYPE_CHECKING:
    from collections.abc import Callable

# Exchanges of each direction that a piece must have: fewer could be one that was matched wrongly.
_LEAST_POINTS = 3
_MOST_PIECES = 1000


@dataclass(frozen=True, slots=True)
class _Line:
    """A piece and its line, with times on the clock that is corrected.

    Attributes:
        first_ns: time of its first exchange.
        last_ns: of its last one.
        clock: the line.
    """

    first_ns: int
    last_ns: int
    clock: ClockCorrection

    def offset_ns(self, time_ns: int) -> int:
        """Return what the line adds to a time."""
        return self.clock.to_run_ns(time_ns) - time_ns


def fit_pieces(below: np.ndarray, above: np.ndarray, span: tuple[int, int]) -> ClockCorrection:
    """Return the clock whose lines run between points, in as few pieces as possible.

    Its error is unknown if a piece would rest on fewer than three exchanges of each direction.

    Args:
        below: times on the clock, and offsets that are lower bounds of the true offsets then, shape
            (points, 2).
        above: the same of upper bounds.
        span: first and last time for which the clock is used.
    Cost: where one line does not fit, sorts the points about 60 times for each piece.
    """
    whole = fit_clock((below[:, 0], below[:, 1]), (above[:, 0], above[:, 1]), span)
    if whole.error_ns is not None:
        return whole
    points = _Points(below, above)
    forward, backward = points.ends(), points.begins()
    if forward is None or backward is None or len(forward) != len(backward):
        return whole
    middles = [points.between(*pair) for pair in zip(backward, forward, strict=True)]
    # Where the change may be anywhere between two ends, a piece between two middles need not fit.
    for bounds in (middles, [points.between(end, end) for end in forward]):
        lines = points.lines(bounds, span)
        if lines is not None:
            found = _joined(lines, bounds, span)
            return dataclasses.replace(found, error_ns=points.error_ns(found, lines, span))
    return whole


class _Points:
    """The bounds of a clock's offset, in order of time."""

    def __init__(self, below: np.ndarray, above: np.ndarray) -> None:
        self._below = below[np.argsort(below[:, 0], kind="stable")]
        self._above = above[np.argsort(above[:, 0], kind="stable")]
        self._times = np.unique(np.concatenate([self._below[:, 0], self._above[:, 0]]))

    def ends(self) -> list[int] | None:
        """Return where each piece but the last ends, as rows of times, taken from the first on."""
        found: list[int] = []
        count, begin = len(self._times), 0
        while True:
            end = _farthest(lambda end, begin=begin: self._fits(begin, end), begin + 1, count)  # type: ignore[misc]
            if end == count:
                return found
            found.append(end)
            begin = end
            if len(found) >= _MOST_PIECES:
                return None

    def begins(self) -> list[int] | None:
        """Return where each piece but the first begins, as rows of times, taken from the last."""
        found: list[int] = []
        end = len(self._times)
        while True:
            length = _farthest(
                lambda length, end=end: self._fits(end - length, end),  # type: ignore[misc]
                *(1, end),
            )
            if length == end:
                return found[::-1]
            end -= length
            found.append(end)
            if len(found) >= _MOST_PIECES:
                return None

    def between(self, first: int, last: int) -> int:
        """Return the time in the middle of a change: after row `first` - 1, before row `last`."""
        return int(self._times[min(first, last) - 1] + self._times[max(first, last)]) // 2

    def lines(self, bounds: list[int], span: tuple[int, int]) -> list[_Line] | None:
        """Return a line for each piece; None if one does not fit, or rests on too few points."""
        found = []
        for first, stop in zip([None, *bounds], [*bounds, None], strict=True):
            below, above = (_within(side, first, stop) for side in (self._below, self._above))
            if min(len(below), len(above)) < _LEAST_POINTS:
                return None
            own = (span[0] if first is None else first, span[1] if stop is None else stop)
            clock = fit_clock((below[:, 0], below[:, 1]), (above[:, 0], above[:, 1]), own)
            if clock.error_ns is None:
                return None
            times = np.concatenate([below[:, 0], above[:, 0]])
            found.append(_Line(int(times.min()), int(times.max()), clock))
        return found

    def error_ns(self, clock: ClockCorrection, lines: list[_Line], span: tuple[int, int]) -> int:
        """Return the largest error of a correction by pieces.

        The true clock is between the bounds of each exchange. Until the next one its drift may be
        another than that of the line, but not by more than drifts of neighbouring pieces differ.
        """
        pieces: list[ClockCorrection | ClockPiece] = [clock, *clock.later]
        change = max(abs(one.drift - other.drift) for one, other in pairwise(pieces))
        starts = [span[0], *(piece.from_ns for piece in clock.later), span[1] + 1]
        worst = 0.0
        first = 0
        for number in range(len(pieces)):
            is_last = number + 1 == len(pieces)
            jump_ns = 0 if is_last else _jump_ns(pieces[number], clock.later[number])
            if not is_last and not jump_ns:
                continue
            times = self._with_middles(starts[first], starts[number + 1], span)
            for side, points in ((1, self._above), (-1, self._below)):
                own = _within(points, starts[first] if first else None,
                              None if is_last else starts[number + 1])  # fmt: skip
                room = side * (own[:, 0] + own[:, 1] - clock.to_run_ns(own[:, 0]))
                worst = max(worst, float(_spread(own[:, 0], room, times, change).max()))
            if jump_ns and lines[number + 1].first_ns - lines[number].last_ns > 2 * jump_ns:
                worst = max(worst, jump_ns)  # nobody knows when it was set
            first = number + 1
        return int(np.ceil(worst)) + 1

    def _with_middles(self, first: int, stop: int, span: tuple[int, int]) -> np.ndarray:
        """Return the times of exchanges of a part, those amid them, and the ends of the span."""
        times = self._times[(self._times >= first) & (self._times < stop)]
        ends = [time for time in span if first <= time < stop]
        return np.unique(np.concatenate([times, (times[1:] + times[:-1]) // 2, ends]))

    def _fits(self, begin: int, end: int) -> bool:
        first, last = self._times[begin], self._times[end - 1]
        return is_separable(
            *(_within(side, first, last + 1) for side in (self._below, self._above))
        )


def _within(points: np.ndarray, first: int | None, stop: int | None) -> np.ndarray:
    """Return the points from time `first` on, before time `stop`."""
    times = points[:, 0]
    begin = 0 if first is None else int(np.searchsorted(times, first))
    end = len(times) if stop is None else int(np.searchsorted(times, stop))
    return points[begin:end]


def _jump_ns(before: ClockCorrection | ClockPiece, after: ClockPiece) -> int:
    """Return by how much the clock was set; 0 where only its drift changed."""
    at_ns = after.from_ns
    left = before.offset_ns + round(before.drift * (at_ns - before.at_ns))
    right = after.offset_ns + round(after.drift * (at_ns - after.at_ns))
    return abs(left - right) if abs(left - right) > 1 else 0


def _spread(at: np.ndarray, room: np.ndarray, times: np.ndarray, slope: float) -> np.ndarray:
    """Return the least room at `times` that exchanges leave, growing by `slope` away from each."""
    found = np.full(len(times), np.inf)
    for way in (1, -1):
        order = np.argsort(way * at, kind="stable")
        reached = np.minimum.accumulate(room[order] - slope * way * at[order])
        rows = np.searchsorted(way * at[order], way * times, side="right") - 1
        known = rows >= 0
        here = reached[rows[known]] + slope * way * times[known]
        found[known] = np.minimum(found[known], here)
    return found


def _farthest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Return the largest number that fits, if each below one that fits does, too."""
    good, step = least, 1
    while good < most and fits(min(most, good + step)):
        good = min(most, good + step)
        step *= 2
    bad = min(most, good + step)
    if good == most:
        return good
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def _joined(lines: list[_Line], bounds: list[int], span: tuple[int, int]) -> ClockCorrection:
    """Return the correction by lines, with a knot where both lines of a change agree."""
    lefts = [line.offset_ns(time) for line, time in zip(lines, [span[0], *bounds], strict=True)]
    rights = [line.offset_ns(time) for line, time in zip(lines, [*bounds, span[1]], strict=True)]
    jumps = []
    for number, before in enumerate(lines[:-1]):
        after = lines[number + 1]
        jump_ns = abs(lefts[number + 1] - rights[number])
        if jump_ns <= (before.clock.error_ns or 0) + (after.clock.error_ns or 0):
            lefts[number + 1] = rights[number] = (lefts[number + 1] + rights[number]) // 2
            jump_ns = 0
        jumps.append(jump_ns)
    times = list(zip([span[0], *bounds], [*bounds, span[1]], strict=True))
    pieces = [
        ClockCorrection(
            offset_ns=left,
            drift=(right - left) / (stop - first) if stop > first else 0.0,
            at_ns=first,
        )
        for (first, stop), left, right in zip(times, lefts, rights, strict=True)
    ]
    later = tuple(
        ClockPiece(
            from_ns=bound,
            offset_ns=piece.offset_ns,
            drift=piece.drift,
            at_ns=piece.at_ns,
            not_before_ns=before.to_run_ns(line.last_ns) if jump_ns else before.to_run_ns(bound),
        )
        for bound, piece, before, line, jump_ns in zip(
            *(bounds, pieces[1:], pieces, lines, jumps), strict=False
        )
    )
    return dataclasses.replace(pieces[0], later=later)
