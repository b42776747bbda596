"""What the launcher writes of the memory of the processes that a rank starts: loader workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.core.files import read_text
from paceline.core.record import Record

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "children"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildMemory(Record):
    """The memory of the processes below a rank, of those of one time whose memory grew most.

    Private memory is what a process has for itself: written pages that no other process maps.

    Attributes:
        rank: the global rank.
        processes: how many there were.
        seconds: from the first sample to the last, without the time in which they started up.
        private_bytes: in the first sample, summed over them.
        last_private_bytes: in the last.
        steady: share of the growth that came in the second half of that time, 0 to 1.
        copied_bytes: that they shared with other processes and do not share since they touched
            them, their start-up included.
    """

    rank: int
    processes: int
    seconds: float
    private_bytes: int
    last_private_bytes: int
    steady: float
    copied_bytes: int

    @property
    def growth_bytes(self) -> int:
        """By how much their private memory grew."""
        return self.last_private_bytes - self.private_bytes


def file_name(rank: int) -> str:
    """Return the path of a rank's file within the run's folder."""
    return f"{FOLDER}/rank-{rank:05d}.json"


def read_child_memory(run: Path) -> tuple[ChildMemory, ...]:
    """Return what is known of each rank's processes; a file that was cut short is passed over."""
    found = []
    for path in sorted((run / FOLDER).glob("rank-*.json")):
        try:
            found.append(ChildMemory.from_text(read_text(path), where=str(path)))
        except PacelineError:  # by a full disk
            continue
    return tuple(found)
