"""Compares two runs: what became slower, by phase, rank and operation, and whether that is noise.

Steps next to each other are not independent: noise of a node comes in bursts. So the steps of each
run are taken together in blocks, as long as they need to be for their means to be independent, and
the means of the two runs are compared.

Sources: B. Welch, The generalization of Student's problem (1947); batch means, A. Law and
W. Kelton, Simulation modeling and analysis, section 9.5. P-values are multiplied by the number of
comparisons (C. Bonferroni, 1936).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.errors import NotFound
from paceline.core.record import Record
from paceline.core.students_t import t_95
from paceline.trace.analysis.counters import trained_bytes
from paceline.trace.analysis.p_values import upper_tail_t
from paceline.trace.analysis.phases import rank_phases
from paceline.trace.analysis.waits import awaited_calls, waits_and_calls
from paceline.trace.efficiency.dependencies import binding, wait_dependencies
from paceline.trace.format.events import RECV, SEND, Kind
from paceline.trace.merge.windows import BEFORE, SpooledRun

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.trace.analysis import Analysis
    from paceline.trace.analysis.phases import RankPhases
    from paceline.trace.merge import Trace

_WARM_UP, _WARM_UP_SHARE = 5, 0.25  # steps that do not count, and at most this share of a run's
_MOST_BLOCKS, _LEAST_BLOCKS = 32, 4
_BLOCK_STEPS = 4  # in a block, at the least
_CORRELATED = 0.3  # means of blocks that follow each other: then blocks are too short
_MOST_LEFT = 0.8  # of that correlation, in blocks that cannot be longer
_MAX_P_VALUE = 0.01
_LEAST_SHARE = 0.01  # of a step: a smaller change is no news, however certain it is
_WAITS = [PHASES.index(name) for name in ("waiting", "transfer")]
_WINDOW_EVENTS = 1_500_000  # of all ranks: an event takes some 300 bytes while it is measured
SLOWER, FASTER, UNCHANGED = "slower", "faster", "unchanged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Record):
    """How one part of a step changed from run A to run B.

    Attributes:
        part: ``step``, ``phase``, ``rank`` or ``operation``.
        name: of the phase or operation, or the rank's number; empty of the step. The time of a
            phase is the mean over ranks, of a rank its own without communication, of an operation
            that of its data, exposed, the mean over ranks.
        a_s: mean over steps in run A, seconds.
        b_s: the same in run B.
        error_s: half the width of the 95 % interval of the difference; None with too few steps.
        p_value: probability that noise alone makes such a difference in any part; None with too
            few steps.
        verdict: ``slower`` or ``faster`` if the change is significant and at least 1 % of a step of
            run A; ``unchanged`` otherwise.
    """

    part: str
    name: str
    a_s: float
    b_s: float
    error_s: float | None
    p_value: float | None
    verdict: str

    @property
    def change_s(self) -> float:
        """Seconds that a step takes longer in run B."""
        return self.b_s - self.a_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison(Record):
    """What changed from run A to run B.

    Attributes:
        a_steps: steps of run A that are compared, without its first ones.
        b_steps: the same of run B.
        a_ranks: ranks of run A.
        b_ranks: ranks of run B; ranks are compared one by one only if there are as many.
        changes: the step, then phases, ranks and operations, the largest change first in each.
        unlike: how the runs' programs or models differ, in words; empty as far as they do not.
    """

    a_steps: int
    b_steps: int
    a_ranks: int
    b_ranks: int
    changes: tuple[Change, ...]
    unlike: str = ""

    @property
    def step(self) -> Change:
        """The change of the whole step."""
        return self.changes[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunSeries:
    """What the steps of a run took, by part.

    Attributes:
        ranks: that left a trace.
        world_size: number of ranks of the run.
        seconds: of each part and name, as of `Change`, by step, shape (steps,), without the first
            steps and those that were not recorded.
        trained_bytes: of the parameters that the optimizers of a rank step, the most of any rank; 0
            if the traces do not say.
    """

    ranks: int
    world_size: int
    seconds: dict[tuple[str, str], np.ndarray]
    trained_bytes: int = 0


def compare_runs(a: Analysis, b: Analysis) -> RunComparison:
    """Return what became slower or faster from run `a` to run `b`.

    Raises:
        NotFound: a run has no step that all its ranks completed.
    """
    return compare_series(series_of(a, "run A"), series_of(b, "run B"))


def compare_series(a: RunSeries, b: RunSeries) -> RunComparison:
    """Return what became slower or faster from run `a` to run `b`."""
    first, second = a.seconds, b.seconds
    names = [name for name in first if name in second]
    names += [(part, name) for part, name in first.keys() ^ second.keys() if part == "operation"]
    if a.ranks != b.ranks:
        names = [(part, name) for part, name in names if part != "rank"]
    step_s = float(first["step", ""].mean())
    zeros = np.zeros(1)
    changes = [
        _change(name, first.get(name, zeros), second.get(name, zeros), step_s, len(names))
        for name in names
    ]
    order = {"step": 0, "phase": 1, "rank": 2, "operation": 3}
    changes = [change for change in changes if change.a_s > 0 or change.b_s > 0]
    changes.sort(key=lambda change: (order[change.part], -abs(change.change_s), change.name))
    return RunComparison(
        a_steps=len(first["step", ""]),
        b_steps=len(second["step", ""]),
        a_ranks=a.world_size,
        b_ranks=b.world_size,
        changes=tuple(changes),
    )


def series_of(analysis: Analysis, run: str) -> RunSeries:
    """Return what the steps of an analysed run took.

    Args:
        analysis: of the run.
        run: what to call it in an error.

    Raises:
        NotFound: there is no step that all its ranks completed.
    """
    steps = analysis.steps
    _check_steps(steps, run)
    trace = analysis.trace
    found = _parts(trace, analysis.waits, awaited_calls(trace), analysis.phases, (0, steps))
    recorded = np.all([rank.recorded[:steps] for rank in analysis.phases], axis=0)
    return RunSeries(
        ranks=len(trace.ranks),
        world_size=trace.world_size,
        seconds=_kept([found], recorded),
        trained_bytes=max(map(trained_bytes, trace.ranks), default=0),
    )


def read_series(run: Path, name: str, *, window_events: int = _WINDOW_EVENTS) -> RunSeries:
    """Return what the steps of the run in a folder took, in memory that does not grow with it.

    Args:
        run: its folder.
        name: what to call it in an error.
        window_events: most events that are in memory at one time.

    Raises:
        NotFound: there are no traces, or no step that all its ranks completed.
        CorruptTrace: a trace is damaged.
        StorageError: a trace cannot be read, or there is no space for temporary files.
    """
    with SpooledRun(run) as spooled:
        _check_steps(spooled.steps, name)
        windows, trained = [], 0
        for first, stop in spooled.windows(0, spooled.steps, window_events):
            before = max(0, first - BEFORE)
            trace = _from_step(spooled.read(first, stop), before)
            trained = max(trained, *map(trained_bytes, trace.ranks))
            waits, awaited = waits_and_calls(trace)
            phases = rank_phases(trace.ranks, waits)
            windows.append(_parts(trace, waits, awaited, phases, (first - before, stop - before)))
        recorded = np.all(spooled.recorded, axis=0)
        return RunSeries(
            ranks=len(spooled.ranks),
            world_size=spooled.world_size,
            seconds=_kept(windows, recorded),
            trained_bytes=trained,
        )


def _from_step(trace: Trace, first: int) -> Trace:
    """Return a trace whose steps are counted from step `first`."""
    if not first:
        return trace
    ranks = []
    for rank in trace.ranks:
        events = rank.events.copy()
        events["step"] -= np.minimum(events["step"], first)
        ranks.append(dataclasses.replace(rank, events=events))
    return dataclasses.replace(trace, ranks=tuple(ranks))


def _check_steps(steps: int, run: str) -> None:
    if not steps:
        raise NotFound(
            "no step that all ranks completed",
            where=run,
            fix="Compare runs whose ranks completed some steps",
        )


def _kept(
    windows: Sequence[dict[tuple[str, str], np.ndarray]], recorded: np.ndarray
) -> dict[tuple[str, str], np.ndarray]:
    """Return the steps of all windows that count.

    Args:
        windows: seconds by step of each part and name; an operation may be missing in one.
        recorded: which steps all ranks recorded, shape (steps,).
    """
    kept = recorded.copy()
    kept[: min(_WARM_UP, int(_WARM_UP_SHARE * len(kept)))] = False
    names = dict.fromkeys(name for window in windows for name in window)
    return {
        name: np.concatenate(
            [window.get(name, np.zeros(len(window["step", ""]))) for window in windows]
        )[kept]
        for name in names
    }


def _parts(
    trace: Trace,
    waits: Sequence[np.ndarray],
    awaited: tuple[np.ndarray, ...],
    phases: Sequence[RankPhases],
    steps: tuple[int, int],
) -> dict[tuple[str, str], np.ndarray]:
    """Return seconds by step of each part and name, of steps from the first to before the last."""
    own = slice(*steps)
    seconds = np.array([rank.seconds[own] for rank in phases])
    train_s = np.array([rank.train_s[own] for rank in phases])
    means = seconds.mean(axis=0)
    found = {("step", ""): train_s.max(axis=0)}
    found |= {("phase", name): means[:, i] for i, name in enumerate(PHASES)}
    own_s = train_s - seconds[:, :, _WAITS].sum(axis=2)
    found |= {("rank", str(rank.rank)): own_s[i] for i, rank in enumerate(phases)}
    operations = _operations(trace, waits, awaited, steps[1])
    return found | {("operation", name): values[own] for name, values in operations.items()}


def _operations(
    trace: Trace, waits: Sequence[np.ndarray], awaited: tuple[np.ndarray, ...], steps: int
) -> dict[str, np.ndarray]:
    """Return how long data of each operation moved, exposed, by step: the mean over ranks."""
    matches = trace.matches
    names = (*matches.operations, SEND, RECV)
    rows = binding(wait_dependencies(matches, tuple(waits), awaited))
    starts = np.concatenate([[0], np.cumsum([len(found) for found in waits])])
    flat = starts[rows["trace"]] + rows["wait"]
    bound = np.concatenate(waits)[flat]
    of_steps = [rank.events_of(Kind.WAIT)["step"] for rank in trace.ranks]
    own = np.concatenate(of_steps)[flat].astype(np.int64)
    inside = own < steps
    place = rows["operation"].astype(np.int64)[inside] * steps + own[inside]
    moving_s = (bound["end_ns"] - bound["ready_ns"])[inside] / 1e9
    sums = np.bincount(place, moving_s, minlength=len(names) * steps).reshape(len(names), steps)
    return {name: sums[i] / len(trace.ranks) for i, name in enumerate(names) if sums[i].any()}


def _change(
    name: tuple[str, str], a: np.ndarray, b: np.ndarray, step_s: float, comparisons: int
) -> Change:
    change_s = float(b.mean() - a.mean())
    error_s, p_value = _significance(a, b)
    if p_value is not None:
        p_value = min(1.0, p_value * comparisons)
    news = (
        p_value is not None and p_value <= _MAX_P_VALUE and abs(change_s) >= _LEAST_SHARE * step_s
    )
    verdict = (SLOWER if change_s > 0 else FASTER) if news else UNCHANGED
    part, of = name
    return Change(
        part=part,
        name=of,
        a_s=float(a.mean()),
        b_s=float(b.mean()),
        error_s=error_s,
        p_value=p_value,
        verdict=verdict,
    )


def _significance(a: np.ndarray, b: np.ndarray) -> tuple[float | None, float | None]:
    """Return half the width of the 95 % interval of the difference of means, and its p-value."""
    means = [_block_means(values) for values in (a, b)]
    if min(len(blocks) for blocks in means) < _LEAST_BLOCKS:
        return None, None
    errors = [_squared_error(blocks) for blocks in means]
    variance = sum(errors)
    change = abs(float(means[1].mean() - means[0].mean()))
    if variance == 0.0:
        return 0.0, 1.0 if change == 0.0 else 0.0
    freedoms = zip(errors, means, strict=True)
    freedom = variance**2 / sum(error**2 / (len(blocks) - 1) for error, blocks in freedoms)
    freedom_count = max(1, math.floor(freedom))
    error = math.sqrt(variance)
    return t_95(freedom_count) * error, 2 * upper_tail_t(change / error, freedom_count)


def _squared_error(blocks: np.ndarray) -> float:
    """Return the square of the standard error of the mean of blocks.

    What correlation is left between blocks that follow each other makes it larger, as it does in an
    autoregressive process of the first order.
    """
    left = min(max(0.0, _correlation(blocks)), _MOST_LEFT)
    return float(blocks.var(ddof=1)) / len(blocks) * (1 + left) / (1 - left)


def _block_means(values: np.ndarray) -> np.ndarray:
    """Return the means of blocks of steps, as many as leave them independent of each other."""
    blocks = min(_MOST_BLOCKS, len(values) // _BLOCK_STEPS)
    while blocks >= _LEAST_BLOCKS:
        means = np.array([part.mean() for part in np.array_split(values, blocks)])
        if blocks < 2 * _LEAST_BLOCKS or _correlation(means) <= _CORRELATED:
            return means
        blocks //= 2
    return np.zeros(0)


def _correlation(values: np.ndarray) -> float:
    """Return the correlation of values that follow each other."""
    away = values - values.mean()
    total = float((away**2).sum())
    return float((away[1:] * away[:-1]).sum()) / total if total > 0 else 0.0
