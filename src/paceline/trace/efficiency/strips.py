"""What each rank did when: its phases over some steps, in columns of equal time on the run's clock.

A column shows the phase that takes most of it, so that a strip has a size that does not depend on
the run's length. Of a long run the steps around its longest one are shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.efficiency.timeline import phase_timeline
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis import Analysis
    from paceline.trace.analysis.blame import Straggler

MOST_RANKS = 64
MOST_STEPS, LEAST_STEPS = 100, 8
NO_PHASE = -1
# Columns of all ranks together, of one rank, and of a step, enough to see its phases.
_ALL_COLUMNS, _MOST_COLUMNS, _STEP_COLUMNS = 20_000, 4_000, 40


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PhaseStrips:
    """The phases of ranks over some steps.

    Attributes:
        ranks: of the rows.
        first_step: of those shown.
        last_step: the last of them.
        seconds: from the first rank's begin of these steps to the last rank's end.
        step_ends_s: when the first row's steps end, seconds from the begin, shape (steps,).
        phases: of each rank and column, an index of `PHASES`, or `NO_PHASE` where the rank's steps
            have not begun or are over; shape (ranks, columns).
    """

    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    seconds: float
    step_ends_s: np.ndarray
    phases: np.ndarray


def phase_strips(analysis: Analysis) -> PhaseStrips | None:
    """Return the phases of at most `MOST_RANKS` ranks; None where no step is complete.

    Ranks are spread evenly over all, but for those that were late, which are always shown. The more
    ranks, the fewer steps: from `MOST_STEPS` down to `LEAST_STEPS`.

    Cost: 100 bytes for each event of one rank's main thread at a time.
    """
    ranks = [rank.rank for rank in analysis.phases]
    shown = shown_ranks(ranks, analysis.stragglers)
    if not analysis.steps or not shown:
        return None
    columns = min(_MOST_COLUMNS, _ALL_COLUMNS // len(shown))
    count = min(analysis.steps, max(LEAST_STEPS, min(MOST_STEPS, columns // _STEP_COLUMNS)))
    longest_s = np.max([rank.train_s[: analysis.steps] for rank in analysis.phases], axis=0)
    first = int(np.clip(int(longest_s.argmax()) - count // 2, 0, analysis.steps - count))
    spans = [_span_ns(analysis, index, first, first + count) for index in shown]
    if not all(spans):
        return None  # a rank lost these steps, as its buffer was full
    begin_ns, end_ns = min(span[0] for span in spans), max(span[-1] for span in spans)
    edges_ns = np.linspace(begin_ns, end_ns, columns + 1).astype(np.int64)
    phases = np.full((len(shown), columns), NO_PHASE, dtype=np.int8)
    for row, (index, span) in enumerate(zip(shown, spans, strict=True)):
        spent_ns = phase_timeline(analysis, index).between_ns(edges_ns[:-1], edges_ns[1:])
        inside = (edges_ns[1:] > span[0]) & (edges_ns[:-1] < span[-1])
        phases[row, inside] = spent_ns.argmax(axis=1)[inside]
    return PhaseStrips(
        ranks=tuple(analysis.phases[index].rank for index in shown),
        first_step=first,
        last_step=first + count - 1,
        seconds=(end_ns - begin_ns) / 1e9,
        step_ends_s=(np.array(spans[0][1:]) - begin_ns) / 1e9,
        phases=phases,
    )


def shown_ranks(ranks: Sequence[int], stragglers: Sequence[Straggler]) -> list[int]:
    """Return the indices of at most `MOST_RANKS` ranks: spread over all, and the late ones."""
    count = len(ranks)
    if count <= MOST_RANKS:
        return list(range(count))
    late = {straggler.rank for straggler in stragglers[: MOST_RANKS // 2]}
    spread = np.linspace(0, count - 1, MOST_RANKS - len(late)).round().astype(int).tolist()
    return [i for i, rank in enumerate(ranks) if i in spread or rank in late]


def _span_ns(analysis: Analysis, trace_index: int, first: int, stop: int) -> tuple[int, ...]:
    """Return the begin of a rank's steps and the end of each; empty where none was recorded."""
    rank, clock = analysis.trace.ranks[trace_index], analysis.trace.clocks[trace_index]
    steps = rank.events_of(Kind.STEP)
    inside = steps[(steps["step"] >= first) & (steps["step"] < stop)]
    if not len(inside):
        return ()
    begin_ns = clock.to_run_ns(int(inside["begin_ns"].min()))
    return (begin_ns, *np.sort(clock.to_run_ns(inside["end_ns"])).tolist())
