"""Brings the ranks of a run together on one clock.

Ranks of one node share CLOCK_MONOTONIC, recognised by the kernel's boot id. Between nodes the
offset follows from the collectives themselves: nobody leaves a synchronising collective before
everybody has entered it, so for each one and each pair of ranks

    issue_a + offset_a <= completion_b + offset_b     and the same with a and b exchanged,

which bounds the difference of the two offsets from both sides. The middle of the tightest bounds
is taken; its error is at most what the fastest collective took, the mean of both ranks.

Source: the same inequality as in D. L. Mills, RFC 5905 (NTP), with a collective as the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import CorruptTrace, NotFound
from paceline.trace.events import SYNCHRONISING, Kind
from paceline.trace.files import RankTrace, read_trace

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """A run: its ranks in order, and what to add to each rank's times to share rank 0's clock."""

    ranks: tuple[RankTrace, ...]
    offset_ns: tuple[int, ...]
    offset_error_ns: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Ranks that the run had, whether or not all left a trace."""
        return self.ranks[0].status.world_size


def load_run(run: Path) -> Trace:
    """Return the merged traces of the run in folder `run`.

    Raises:
        NotFound: there is no run, or it holds no traces.
        CorruptTrace: a trace is damaged; the rank is named.
    """
    folder = run / "trace"
    # An empty file is of a rank that ended, or found the disk full, before it could record.
    paths = [path for path in sorted(folder.glob("rank-*.trace")) if path.stat().st_size]
    if not paths:
        raise NotFound(
            "no traces", where=str(folder), fix="Record a run first: paceline run script.py"
        )
    return merge([read_trace(path) for path in paths])


def merge(ranks: list[RankTrace]) -> Trace:
    """Return the ranks in order with their clock offsets.

    Raises:
        CorruptTrace: two traces claim the same rank, or they are of different runs.
    """
    ranks = sorted(ranks, key=lambda one: one.rank)
    numbers = [one.rank for one in ranks]
    if len(set(numbers)) != len(numbers):
        raise CorruptTrace("two traces claim the same rank", where=f"ranks {numbers}")
    if len({one.status.world_size for one in ranks}) > 1:
        raise CorruptTrace("the traces are of runs with different numbers of ranks")
    reference = ranks[0]
    offsets = [_offset(reference, one) for one in ranks]
    return Trace(
        ranks=tuple(ranks),
        offset_ns=tuple(offset for offset, _ in offsets),
        offset_error_ns=tuple(error for _, error in offsets),
    )


def collective_key(rank: RankTrace, event: np.void) -> tuple[str, int]:
    """Return what is equal for one collective on all its ranks: group name and sequence."""
    return rank.names[event["group"]], int(event["sequence"])


def _offset(reference: RankTrace, other: RankTrace) -> tuple[int, int]:
    """Return what to add to `other`'s times, and the largest error of that."""
    if other.status.boot_id and other.status.boot_id == reference.status.boot_id:
        return 0, 0
    mine, theirs = _synchronising_times(reference), _synchronising_times(other)
    common = sorted(mine.keys() & theirs.keys())
    if not common:  # no evidence but the wall clocks
        return (
            other.status.opened_realtime_ns
            - other.status.opened_monotonic_ns
            - (reference.status.opened_realtime_ns - reference.status.opened_monotonic_ns)
        ), 0
    a = np.array([mine[key] for key in common], dtype=np.int64)
    b = np.array([theirs[key] for key in common], dtype=np.int64)
    low = int((a[:, 0] - b[:, 1]).max())  # issue_a <= completion_b + offset
    high = int((a[:, 1] - b[:, 0]).min())  # issue_b + offset <= completion_a
    return (low + high) // 2, abs(high - low) // 2


def _synchronising_times(rank: RankTrace) -> dict[tuple[str, int], tuple[int, int]]:
    return {
        collective_key(rank, event): (int(event["begin_ns"]), int(event["end_ns"]))
        for event in rank.of(Kind.COLLECTIVE)
        if rank.names[event["name"]] in SYNCHRONISING
    }
