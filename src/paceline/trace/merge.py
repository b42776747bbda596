"""Brings the ranks of a run together on one clock.

Ranks of one node share CLOCK_MONOTONIC, recognised by the kernel's boot id. Between nodes a clock
is off by a line: an offset, and a drift of some parts per million that an hour turns into a tenth
of a second. Both follow from the collectives themselves: nobody leaves a synchronising collective
before everybody has entered it, so for each one and ranks a and b

    issue_a <= run(completion_b)     and     run(issue_b) <= completion_a

with run(t) = t + offset + drift (t - at): points below and points above the line. The line taken
keeps away from both, vertically: of the drifts that leave nine tenths of the largest distance it
has the smallest, since a short run tells little of drift. Every line between the points could be
the true one, so the error is the largest distance to any of these over the node's events: about
what the fastest collectives took. Points that no line parts mean a clock that was set or slewed
meanwhile: the line is then the one least contradicted, and its error is unknown.

Source: the same inequality as in D. L. Mills, RFC 5905 (NTP), with a collective as the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from paceline.core.errors import CorruptTrace, NotFound, StorageError
from paceline.trace.events import SYNCHRONISING, Kind
from paceline.trace.files import RankTrace, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# What clock_adjtime(2) lets a clock be slewed by; a crystal alone is off by a tenth of it.
MAX_DRIFT = 500e-6
_HALVINGS = 96  # each leaves two thirds: 1e-3 becomes 1e-20, below a nanosecond in a year
_KEPT_GAP = 0.9

T = TypeVar("T", int, np.ndarray)
_Times = dict[tuple[str, int], tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """How a rank's times become the run's, which are those of the first rank's clock.

    Attributes:
        offset_ns: what is added to the rank's time `at_ns`.
        drift: what is added more for each nanosecond since.
        at_ns: on the rank's own clock.
        error_ns: the most that a time on the run's clock is wrong by; None if that is not known.
    """

    offset_ns: int = 0
    drift: float = 0.0
    at_ns: int = 0
    error_ns: int | None = 0

    def to_run_ns(self, times_ns: T) -> T:
        """Return times of the rank, an integer or an array of them, on the run's clock."""
        if isinstance(times_ns, np.ndarray):
            signed = times_ns.astype(np.int64)
            if not self.drift:
                return signed + self.offset_ns
            more = np.rint(self.drift * (signed - self.at_ns)).astype(np.int64)
            return np.asarray(signed + self.offset_ns + more)
        return times_ns + self.offset_ns + round(self.drift * (times_ns - self.at_ns))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """A run: its ranks in order, and the clock of each."""

    ranks: tuple[RankTrace, ...]
    clocks: tuple[Clock, ...]

    @property
    def world_size(self) -> int:
        """Ranks that the run had, whether or not all left a trace."""
        return self.ranks[0].status.world_size

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that left no trace."""
        return tuple(sorted(set(range(self.world_size)) - {one.rank for one in self.ranks}))


def load_run(run: Path) -> Trace:
    """Return the merged traces of the run in folder `run`.

    Raises:
        NotFound: there is no run, or it holds no traces.
        CorruptTrace: a trace is damaged; the rank is named.
        StorageError: the folder or a trace cannot be read.
    """
    folder = run / "trace"
    try:
        # An empty file is of a rank that ended, or found the disk full, before it could record.
        found = sorted(path for path in folder.iterdir() if path.stat().st_size)
    except FileNotFoundError:
        found = []
    except OSError as problem:
        raise StorageError(
            "cannot read the run's traces",
            where=str(folder),
            why=problem.strerror or str(problem),
            fix="Check that you may read the folder",
        ) from problem
    paths = [path for path in found if path.match("rank-*.trace")]
    if not paths:
        raise NotFound(
            "no traces", where=str(folder), fix="Record a run first: paceline run script.py"
        )
    return merge([read_trace(path) for path in paths])


def merge(ranks: list[RankTrace]) -> Trace:
    """Return the ranks in order with their clocks.

    Raises:
        CorruptTrace: two traces claim the same rank, or they are of different runs.
    """
    ranks = sorted(ranks, key=lambda one: one.rank)
    numbers = [one.rank for one in ranks]
    if len(set(numbers)) != len(numbers):
        raise CorruptTrace(
            "two traces claim the same rank",
            where=f"ranks {numbers}",
            fix="Keep the traces of one run in a folder",
        )
    sizes = sorted({one.status.world_size for one in ranks})
    if len(sizes) > 1:
        raise CorruptTrace(
            "the traces are of runs with different numbers of ranks",
            where=f"runs of {sizes} ranks",
            fix="Keep the traces of one run in a folder",
        )
    nodes: dict[str, list[RankTrace]] = {}
    for one in ranks:
        nodes.setdefault(_node(one), []).append(one)
    reference = ranks[0]
    clocks = {_node(reference): Clock()}
    others = nodes.keys() - clocks.keys()
    mine = _synchronising_times(reference) if others else {}
    for node in others:
        clocks[node] = _clock(reference, mine, nodes[node])
    return Trace(ranks=tuple(ranks), clocks=tuple(clocks[_node(one)] for one in ranks))


def _node(rank: RankTrace) -> str:
    return rank.status.boot_id or f"unknown node of rank {rank.rank}"


def _clock(reference: RankTrace, mine: _Times, members: list[RankTrace]) -> Clock:
    """Return the clock of a node, from what its ranks did together with the reference."""
    pairs = [
        (*mine[key], *times)
        for one in members
        for key, times in _synchronising_times(one).items()
        if key in mine
    ]
    if not pairs:  # no evidence but the wall clocks, and nobody knows how well they agree
        first = members[0].status
        offset_ns = (first.opened_realtime_ns - first.opened_monotonic_ns) - (
            reference.status.opened_realtime_ns - reference.status.opened_monotonic_ns
        )
        return Clock(offset_ns=offset_ns, error_ns=None)
    issue_a, complete_a, issue_b, complete_b = np.array(pairs, dtype=np.int64).T
    events = [one.events for one in members if len(one.events)]
    span = (
        int(min(one["begin_ns"].min() for one in events)),
        int(max(one["end_ns"].max() for one in events)),
    )
    return fit_clock((complete_b, issue_a - complete_b), (issue_b, complete_a - issue_b), span)


def fit_clock(
    below: tuple[np.ndarray, np.ndarray],
    above: tuple[np.ndarray, np.ndarray],
    span: tuple[int, int],
) -> Clock:
    """Return the clock whose line runs between points, as far as possible from both kinds.

    Args:
        below: times on the clock, and offsets that are not larger than the true ones then.
        above: times, and offsets that are not smaller.
        span: first and last time for which the clock is used.
    Cost: sorts the points, then a constant number of looks at their hulls.
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
    return Clock(offset_ns=base_ns + round(middle), drift=drift, at_ns=at_ns, error_ns=error_ns)


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


def _synchronising_times(rank: RankTrace) -> _Times:
    """Return the issue and completion of each collective that synchronises, by its key."""
    events = rank.of(Kind.COLLECTIVE)
    wanted = [i for i, name in enumerate(rank.names) if name in SYNCHRONISING]
    events = events[np.isin(events["name"], wanted)]
    columns = (events[field].tolist() for field in ("group", "sequence", "begin_ns", "end_ns"))
    return {
        (rank.names[group], sequence): (begin, end)
        for group, sequence, begin, end in zip(*columns, strict=True)
    }
