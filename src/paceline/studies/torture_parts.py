"""Shared parts of the store's fault campaigns: options, the source to pack, the counts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.record import Record
from paceline.store import PackOptions

if TYPE_CHECKING:
    from pathlib import Path

_MAX_SHOWN = 20
_SHARD_BYTES = 60_000
_LENGTHS = (0, 1, 17, 100, 700, 2_000, 9_000, 30_000, 70_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign(Record):
    """The counts of one campaign, and its first few failures."""

    name: str
    cases: int
    counts: dict[str, int]
    failures: tuple[str, ...]
    failure_count: int
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TortureOptions:
    """How much to do; a `fault_limit` of None lets each call fail."""

    corruptions: int = 2000
    kills: int = 100
    fault_limit: int | None = None
    seed: int = 1


class Tally:
    """Counts the cases of a campaign as they end."""

    def __init__(self) -> None:
        self.cases = 0
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def note(self, result: str, problem: str = "") -> None:
        """Count a case."""
        self.cases += 1
        self.counts[result if not problem else "FAILED"] += 1
        if problem:
            self.failures.append(problem)

    def campaign(self, name: str, elapsed_s: float) -> Campaign:
        """Return the counts as they are."""
        return Campaign(
            name=name,
            cases=self.cases,
            counts=dict(sorted(self.counts.items())),
            failures=tuple(self.failures[:_MAX_SHOWN]),
            failure_count=len(self.failures),
            elapsed_s=round(elapsed_s, 3),
        )


def make_source(source: Path, seed: int, folder: str, count: int = 48) -> None:
    """Make samples of all kinds: empty, small, larger than a page or a shard, dense or not."""
    generator = random.Random(seed)
    (source / "empty").mkdir(parents=True)
    for k in range(count):
        path = source / f"{folder}{k % 4}" / f"sample-{k:02d}"
        path.parent.mkdir(exist_ok=True)
        length = _LENGTHS[k % len(_LENGTHS)]
        body = generator.randbytes(length)
        path.write_bytes(body if k % 3 else (b"%d and again " % k * (length // 8))[:length])


def pack_options() -> PackOptions:
    """Return how to pack: shards that are small, samples encoded or in chunks, parity."""
    return PackOptions(shard_bytes=_SHARD_BYTES, codec="zstd-dict", parity_group=3)
