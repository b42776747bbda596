"""The times of a machine's operators, kept in the user's cache folder.

One file for each machine, torch, allocator, number of threads and of processes: a time holds for
these alone. An operator that was measured for one model is known for the next. Files of another
version, or damaged ones, count as empty: they are measured again.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.config import cache_folder
from paceline.core.errors import ConfigError, CorruptData, NotFound, StorageError
from paceline.core.files import commit_text, read_text
from paceline.core.measured_step import OperatorTime
from paceline.core.record import Record, digest

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.measured_step import MeasuredStep

MOST_OPERATORS = 20_000  # about 4 MB; the oldest are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceKey(Record):
    """What the times of operators hold for.

    Attributes:
        machine: digest of the Machine.
        torch: its version.
        allocator: of the processes.
        threads: of each.
        processes: that ran at the same time.
    """

    machine: str
    torch: str
    allocator: str
    threads: int
    processes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPrices(Record):
    """Times of operators by signature, the oldest first."""

    key: PriceKey
    times: dict[str, OperatorTime] = field(default_factory=dict)


def prices_path(key: PriceKey) -> Path:
    """Return where the times for a key lie."""
    name = re.sub(r"[^0-9a-f]", "", digest(key.to_json()).removeprefix("sha256:"))[:16]
    return cache_folder() / "operators" / f"{name}.json"


def known_times(key: PriceKey) -> dict[str, OperatorTime]:
    """Return the times that were measured before; none if there are none or they cannot be read."""
    path = prices_path(key)
    try:
        prices = OperatorPrices.from_text(read_text(path), where=str(path))
    except (NotFound, ConfigError, StorageError, CorruptData):
        return {}
    return dict(prices.times) if prices.key == key else {}


def keep_times(key: PriceKey, known: dict[str, OperatorTime], step: MeasuredStep) -> None:
    """Add the times of a measured step to those that are known.

    Raises:
        StorageError: the cache folder cannot be written.
    """
    times = dict(known)
    for equal in step.operators:
        if equal.time is not None:
            times[equal.signature] = equal.time
    kept = dict(list(times.items())[-MOST_OPERATORS:])
    path = prices_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise StorageError(
            "the cache folder cannot be made",
            where=str(path.parent),
            why=problem.strerror or os.strerror(problem.errno or 0),
            fix="Set XDG_CACHE_HOME to a folder that you can write",
        ) from problem
    commit_text(path, OperatorPrices(key=key, times=kept).to_text())
