"""Merges the traces of a run's ranks: matches them, and brings their times onto one clock.

Each rank's file stays as it was written; `load_run` merges the files in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import CorruptTrace, NotFound, storage_errors
from paceline.trace.format.files import RankTrace, read_trace
from paceline.trace.merge.clock_bounds import fit_clocks
from paceline.trace.merge.clocks import ClockCorrection
from paceline.trace.merge.matches import Matches
from paceline.trace.merge.matching import match
from paceline.trace.merge.prepare import prepared
from paceline.trace.merge.timing import Violations, on_run_clock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.trace.format.header import Status


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The merged traces of a run.

    Attributes:
        ranks: the trace of each rank that left one, ordered by rank.
        clocks: the clock correction of each trace.
        matches: matched collectives and messages, with times on the run's clock.
        violations: what contradicted causality on that clock, and was repaired in `matches`.
    """

    ranks: tuple[RankTrace, ...]
    clocks: tuple[ClockCorrection, ...]
    matches: Matches
    violations: Violations = field(default_factory=Violations)

    @property
    def world_size(self) -> int:
        """Number of ranks of the run, including ranks that left no trace."""
        return self.ranks[0].status.world_size

    @property
    def step_rule(self) -> str:
        """What ends a step of the training loop, by a value of `StepRule`."""
        return next((rank.step_rule for rank in self.ranks if rank.step_rule), "")

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that left no trace."""
        return tuple(sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks}))


def trace_paths(run: Path) -> list[Path]:
    """Return the paths of the traces of the run in folder `run`, ordered by rank.

    Raises:
        NotFound: there is no run, or it holds no traces.
        StorageError: the folder cannot be read.
    """
    folder = run / "trace"
    fix = "Check that you may read the folder"
    with storage_errors("cannot read the run's traces", where=folder, fix=fix):
        try:
            # An empty file is of a rank that ended, or found the disk full, before it could record.
            found = sorted(path for path in folder.iterdir() if path.stat().st_size)
        except FileNotFoundError:
            found = []
    paths = [path for path in found if path.match("rank-*.trace")]
    if not paths:
        raise NotFound(
            "no traces", where=str(folder), fix="Record a run first: paceline run script.py"
        )
    return paths


def load_run(run: Path) -> Trace:
    """Return the merged traces of the run in folder `run`.

    Raises:
        NotFound: there is no run, or it holds no traces.
        CorruptTrace: a trace is damaged; the rank is named.
        StorageError: the folder or a trace cannot be read.
    """
    return merge([read_trace(path) for path in trace_paths(run)])


def merge(ranks: list[RankTrace]) -> Trace:
    """Return the ranks in order, on one clock and matched, with the steps of their loops.

    Raises:
        CorruptTrace: two traces claim the same rank, or they are of different runs.
    """
    ranks = sorted(ranks, key=lambda r: r.rank)
    ranks = list(prepared([partial(_same, rank) for rank in ranks]))
    check_one_run([rank.status for rank in ranks])
    matches = match(ranks)
    clocks = fit_clocks(ranks, matches)
    return on_one_clock(ranks, matches, clocks)


def on_one_clock(
    ranks: Sequence[RankTrace], matches: Matches, clocks: Sequence[ClockCorrection]
) -> Trace:
    """Return the trace of ranks whose matches have times on each rank's own clock."""
    matches, violations = on_run_clock(matches, clocks)
    return Trace(ranks=tuple(ranks), clocks=tuple(clocks), matches=matches, violations=violations)


def check_one_run(statuses: Sequence[Status]) -> None:
    """Check that traces are of different ranks of one run.

    Raises:
        CorruptTrace: two traces claim the same rank, or they are of different runs.
    """
    numbers = [status.rank for status in statuses]
    if len(set(numbers)) != len(numbers):
        raise CorruptTrace(
            "two traces claim the same rank",
            where=f"ranks {numbers}",
            fix="Keep the traces of one run in a folder",
        )
    sizes = sorted({status.world_size for status in statuses})
    if len(sizes) > 1:
        raise CorruptTrace(
            "the traces are of runs with different numbers of ranks",
            where=f"runs of {sizes} ranks",
            fix="Keep the traces of one run in a folder",
        )


def _same(rank: RankTrace) -> RankTrace:
    return rank
