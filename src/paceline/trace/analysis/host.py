"""Names the script's own work between phases, and says how long it took.

Some of it is recorded (HOST events). The rest lies in *gaps*: from the end of one event of the main
thread to the begin of the next. A training loop does the same again and again, so a gap is known by
the events around it. Samples that fall into gaps of one kind say what is executed there, and the
time of all gaps of that kind is split among their names by the number of samples. A kind of gap
that no sample fell into stays without a name (``other``). A stack that was read in another gap than
the sample is of does not say what was executed then: it counts as `PYTHON_CODE`.

A share p of n samples has a standard error of sqrt(p (1 - p) / n): few samples make rough figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import MAIN, PYTHON_CODE, Kind
from paceline.trace.merge.evaluation import evaluation_spans, in_spans, span_of

if TYPE_CHECKING:
    from paceline.trace.format.files import RankTrace

_BOUNDS = (
    *(Kind.INPUT, Kind.COPY, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT),
    *(Kind.CHECKPOINT, Kind.EVALUATION, Kind.HOST, Kind.STEP, Kind.READ, Kind.WRITE),
    Kind.COMPILATION,
)
_FORCED_NS = 4_500_000  # the interval of sys.getswitchinterval() is 5 ms
TIMES_MAX = 20  # names that are reported


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTime(Record):
    """Time of one kind of work between phases, summed over a rank's loop.

    Attributes:
        name: of the work that a hook saw, or of the function or line that samples found.
        measured_s: its seconds; for samples an estimate.
        samples: number of samples that it rests on; 0 if a hook timed it.
        near: whether most of them were read late, as the main thread gave the interpreter's lock
            away by itself: the work may have been at lines before.
    """

    name: str
    measured_s: float
    samples: int = 0
    near: bool = False

    @property
    def words(self) -> str:
        """The name as it is shown."""
        return f"near {self.name}" if self.near else self.name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostWork:
    """The work between a rank's phases.

    Attributes:
        times: by name, the longest first, recorded and sampled.
        sampled_s: seconds of the gaps that samples name, shape (steps,).
    """

    times: tuple[HostTime, ...]
    sampled_s: np.ndarray


def host_work(rank: RankTrace, begins: np.ndarray, ends: np.ndarray) -> HostWork:
    """Return the named work between phases of a rank.

    Args:
        rank: its trace.
        begins: when each step began, shape (steps,), nanoseconds on the rank's clock.
        ends: when each step ended, shaped as `begins`.
    """
    seconds: dict[tuple[str, int], float] = {}
    sampled_s, near = np.zeros(len(begins)), set[str]()
    if len(begins):
        for name, own_s in _recorded_s(rank, int(begins[0]), int(ends[-1])).items():
            seconds[name, 0] = own_s
        samples = rank.events_of(Kind.SAMPLE)
        if len(samples):
            gaps = _gaps(rank, int(begins[0]), int(ends[-1]))
            sampled, named = _sampled(rank, gaps, samples)
            seconds.update(named)
            near = _read_late(rank, samples)
            steps = np.searchsorted(ends, gaps["end_ns"], side="left")
            lengths_s = (gaps["end_ns"] - gaps["begin_ns"]) / 1e9
            chosen = sampled & (steps < len(ends))
            sampled_s = np.bincount(
                steps[chosen], weights=lengths_s[chosen], minlength=len(ends)
            ).astype(float)
    longest = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))[:TIMES_MAX]
    times = tuple(
        HostTime(name=name, measured_s=own_s, samples=count, near=count > 0 and name in near)
        for (name, count), own_s in longest
    )
    return HostWork(times=times, sampled_s=sampled_s)


_GAP = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("kind", "<i8")])


def _gaps(rank: RankTrace, first_ns: int, end_ns: int) -> np.ndarray:
    """Return the gaps between outermost events of the main thread, array of `_GAP`.

    The end of a step bounds gaps, too, so that none is of two steps.
    """
    events = rank.events_of(*_BOUNDS)
    events = events[(events["location"] == MAIN) & (events["end_ns"] > first_ns)]
    events = events[events["begin_ns"] <= end_ns]
    is_step = events["kind"] == Kind.STEP
    begins = np.where(is_step, events["end_ns"], events["begin_ns"]).astype(np.int64)
    ends = events["end_ns"].astype(np.int64)
    order = np.lexsort((-ends, begins))
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    what = (events["kind"].astype(np.int64) << 16 | events["name"])[order]
    latest = np.maximum.accumulate(np.where(np.diff(ends, prepend=-1) > 0, np.arange(len(ends)), 0))
    gaps = np.zeros(max(0, len(ends) - 1), _GAP)
    if len(gaps):
        gaps["begin_ns"], gaps["end_ns"] = ends[:-1], begins[1:]
        gaps["kind"] = what[latest[:-1]] << 32 | what[1:]
    gaps = gaps[(gaps["end_ns"] > gaps["begin_ns"]) & (gaps["end_ns"] <= end_ns)]
    return np.asarray(gaps[gaps["begin_ns"] >= first_ns])


def _sampled(
    rank: RankTrace, gaps: np.ndarray, samples: np.ndarray
) -> tuple[np.ndarray, dict[tuple[str, int], float]]:
    """Return which gaps are of a kind that was sampled, and seconds by (name, samples)."""
    kinds, kind_of = np.unique(gaps["kind"], return_inverse=True)
    lengths_s = (gaps["end_ns"] - gaps["begin_ns"]) / 1e9
    total_s = np.bincount(kind_of, weights=lengths_s, minlength=len(kinds))
    times = samples["begin_ns"].astype(np.int64)
    at = span_of(times, gaps)
    inside = at >= 0
    all_names = (*rank.names, PYTHON_CODE)
    read_ns = times[inside] + samples["amount"][inside].astype(np.int64)
    is_known = read_ns < gaps["end_ns"][at[inside]]
    names = np.where(is_known, samples["name"][inside], all_names.index(PYTHON_CODE))
    counts = np.zeros((len(kinds), len(all_names)))
    np.add.at(counts, (kind_of[at[inside]], names), 1)
    per_kind = counts.sum(axis=1)
    known = per_kind > 0
    seconds = (counts[known] * (total_s[known] / per_kind[known])[:, None]).sum(axis=0)
    found = {
        (all_names[name], int(counts[:, name].sum())): float(seconds[name])
        for name in np.flatnonzero(seconds).tolist()
    }
    return known[kind_of], found


def _read_late(rank: RankTrace, samples: np.ndarray) -> set[str]:
    """Return the names of which most samples were read late, but not by force.

    The interpreter has a thread give its lock to another after an interval, wherever it is then.
    """
    late_ns = samples["amount"].astype(np.int64)
    is_late = (late_ns > 0) & (late_ns < _FORCED_NS)
    counts = np.bincount(samples["name"], minlength=len(rank.names))
    late = np.bincount(samples["name"], weights=is_late, minlength=len(rank.names))
    return {rank.names[name] for name in np.flatnonzero(2 * late > counts).tolist()} - {PYTHON_CODE}


def _recorded_s(rank: RankTrace, first_ns: int, end_ns: int) -> dict[str, float]:
    """Return the seconds of HOST events by name, without those in an evaluation.

    Work that is nested in other host work, such as garbage collection while the script logs, counts
    by both names here.
    """
    events = rank.events_of(Kind.HOST)
    events = events[(events["location"] == MAIN) & (events["begin_ns"] >= first_ns)]
    events = events[events["end_ns"] <= end_ns]
    events = events[~in_spans(events["begin_ns"], evaluation_spans(rank))]
    lengths_s = (events["end_ns"] - events["begin_ns"]) / 1e9
    sums = np.bincount(events["name"], weights=lengths_s, minlength=len(rank.names))
    return {rank.names[name]: float(sums[name]) for name in np.flatnonzero(sums).tolist()}
