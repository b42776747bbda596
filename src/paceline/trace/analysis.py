"""One pass from a run's events to its answers: who matched whom, where time went, who was late.

`analyse` makes the `Analysis` once; launch, report and stats read it. Every step below works on
arrays over all events of a rank or of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.blame import BlameRules, Straggler, find_stragglers
from paceline.trace.communication import Traffic, traffic
from paceline.trace.matches import Mismatch
from paceline.trace.merge import Trace
from paceline.trace.phases import RankPhases, rank_phases, step_time_s
from paceline.trace.skew import skew_s
from paceline.trace.waits import wait_intervals

if TYPE_CHECKING:
    from paceline.trace.matches import Matches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Analysis:
    """All that a run's trace tells.

    Attributes:
        trace: the run.
        waits: of each rank, of `WAIT_INTERVAL`, ordered by begin.
        phases: seconds by step and phase, one for each rank that left a trace.
        skew_s: of each rank in each step that all ranks completed, shape (ranks, steps), seconds.
        stragglers: who was late, the costliest first.
        traffic: collectives and messages by operation, group and size, the costliest first.
        mismatches: the first collectives that ranks joined without agreeing on what they are; all
            such are left out of waits, skew and traffic.
    """

    trace: Trace
    waits: tuple[np.ndarray, ...]
    phases: tuple[RankPhases, ...]
    skew_s: np.ndarray
    stragglers: tuple[Straggler, ...]
    traffic: tuple[Traffic, ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def matches(self) -> Matches:
        """What the ranks did together."""
        return self.trace.matches

    @property
    def steps(self) -> int:
        """Steps that every rank completed."""
        return int(self.skew_s.shape[1])

    @property
    def step_time_s(self) -> float:
        """Median over steps of the slowest rank's step time."""
        return step_time_s(self.phases)

    @property
    def untimed_count(self) -> int:
        """Collectives and messages whose completion was not seen: their transfer is unknown."""
        return sum(line.untimed_count for line in self.traffic)


def analyse(trace: Trace, rules: BlameRules | None = None) -> Analysis:
    """Return what the trace tells.

    Args:
        trace: a run, from `load_run` or `merge`.
        rules: when a rank counts as a straggler.

    Raises:
        CorruptTrace: a rank's steps are not numbered as a run numbers them.
    """
    waits = wait_intervals(trace)
    phases = rank_phases(trace.ranks, waits)
    steps = min((rank.steps for rank in phases), default=0)
    skew = skew_s(trace.matches, waits, steps)
    return Analysis(
        trace=trace,
        waits=waits,
        phases=phases,
        skew_s=skew,
        stragglers=find_stragglers(phases, skew, rules),
        traffic=traffic(trace.matches),
        mismatches=trace.matches.mismatches(),
    )
