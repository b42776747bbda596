"""What the launcher writes of a run that hung: the rank, why, and what all ranks were doing."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.record import Record

HANG_NAME = "hang.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class HungRank(Record):
    """What a rank was doing when the run hung.

    Attributes:
        rank: the global rank.
        doing: in words: which collective it was in, or had left last.
        stack: of its main thread, the innermost frame first; where it has no frames that can be
            read, where it is in the kernel. Empty for a rank of another node.
    """

    rank: int
    doing: str
    stack: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HungChild(Record):
    """A process that the rank that hangs has started: a loader's worker.

    Attributes:
        process: its number.
        stack: of its main thread, as that of a rank.
    """

    process: int
    stack: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang(Record):
    """A run that hung, and the rank for which the others waited.

    Attributes:
        rank: its global rank.
        kind: ``blocked``, ``stopped``, ``gone``, ``mismatched`` or ``circle``
            (`paceline.launch.hangs.detector.HangKind`).
        detail: the verdict, a clause about the rank.
        waiting: ranks that waited for it; none where its own loop waits for a batch.
        waited_s: how long they had waited.
        ranks: all ranks of which something is known.
        step: in which the rank was then.
        phase: of that step; empty in records of before.
        children: Python's processes below the rank, where it waits for a batch.
    """

    rank: int
    kind: str
    detail: str
    waiting: tuple[int, ...]
    waited_s: float
    ranks: tuple[HungRank, ...]
    step: int = 0
    phase: str = ""
    children: tuple[HungChild, ...] = ()
