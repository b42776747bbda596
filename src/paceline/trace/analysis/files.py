"""What a run did with files: opens, stats, reads, writes, bytes, time and concurrency per file.

The counts are of all calls that the preloaded library native/io saw: of the rank's threads, and of
the processes that it forked, such as a loader's workers. Time is summed over them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import IO_AT_ONCE, IO_COUNTERS, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class FileUse(Record):
    """What all ranks did with one file.

    Attributes:
        path: of the file or folder; in parentheses what stands for many files.
        ranks: that called for it, in order.
        calls: number of calls by operation: open, stat, list, read, write, sync, map, close.
        seconds: in these calls, by operation, summed over threads, workers and ranks.
        read_bytes: that calls gave; what is read by a mapped file is not among them.
        written_bytes: that calls took.
        at_once: the most calls of one rank that were under way at one time.
    """

    path: str
    ranks: tuple[int, ...]
    calls: dict[str, int]
    seconds: dict[str, float]
    read_bytes: int
    written_bytes: int
    at_once: int

    @property
    def total_s(self) -> float:
        """Seconds in all calls."""
        return sum(self.seconds.values())


def file_uses(ranks: Sequence[RankTrace]) -> tuple[FileUse, ...]:
    """Return what a run did with each file, the longest time first; empty if it was not recorded.

    Args:
        ranks: trace of each rank.
    """
    found: dict[str, list[tuple[int, dict[str, int]]]] = {}
    for rank in ranks:
        for path, counts in _counts(rank).items():
            found.setdefault(path, []).append((rank.rank, counts))
    uses = [_use(path, by_rank) for path, by_rank in found.items()]
    return tuple(sorted(uses, key=lambda use: (-use.total_s, use.path)))


def _counts(rank: RankTrace) -> dict[str, dict[str, int]]:
    """Return the counters of each file of a rank, by path and counter."""
    names = np.array([name.startswith("io_") for name in rank.names], dtype=bool)
    counters = rank.events[rank.events["kind"] == Kind.COUNTER]
    found: dict[str, dict[str, int]] = {}
    for event in counters[names[counters["name"]]] if len(names) else ():
        path = rank.names[int(event["tag"])]
        found.setdefault(path, {})[rank.names[int(event["name"])]] = int(event["amount"])
    return found


def _use(path: str, by_rank: list[tuple[int, dict[str, int]]]) -> FileUse:
    def total(name: str) -> int:
        return sum(counts.get(name, 0) for _, counts in by_rank)

    calls = {word: total(name) for word, name in IO_COUNTERS.items()}
    return FileUse(
        path=path,
        ranks=tuple(sorted(rank for rank, _ in by_rank)),
        calls={word: count for word, count in calls.items() if count},
        seconds={
            word: total(f"{name}_ns") / 1e9 for word, name in IO_COUNTERS.items() if calls[word]
        },
        read_bytes=total(f"{IO_COUNTERS['read']}_bytes"),
        written_bytes=total(f"{IO_COUNTERS['write']}_bytes"),
        at_once=max(counts.get(IO_AT_ONCE, 0) for _, counts in by_rank),
    )
