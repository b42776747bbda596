"""The log of a sweep: one line for each cell that ended, so that an interrupted sweep goes on.

::

    OUT/sweep.json        what all runs have in common; a sweep of something else is refused
    OUT/cells.jsonl       a `CellRun` a line, appended and synced when the cell has ended
    OUT/runs/CELL-1/      the run's folder, `paceline report` reads it
    OUT/profile.json      the profile of what the log holds

A line that a kill cut short counts as not written: its cell is run again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from paceline.core.errors import ConfigError, DestinationExists, UsageError, storage_errors
from paceline.core.files import (
    LockOutcome,
    append_lines,
    commit_text,
    read_text,
    try_lock,
)
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.studies.characterize.axes import Cell

SWEEP_NAME, LOG_NAME, RUNS_NAME = "sweep.json", "cells.jsonl", "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRun(Record):
    """One run of a cell; seconds and bytes are per step.

    Attributes:
        key: of the cell.
        name: of the cell's settings.
        ranks: of the job.
        settings: by the axis's name.
        repeat: from 1 on.
        run: folder, beside the log.
        elapsed_s: from the start of the run to the end of its analysis.
        failure: why it did not run to its end; empty if it did.
        throughput: units per second of all ranks, the median over blocks of steps.
        steps: of the loop after its warm-up.
        step_s: the median step of the slowest rank.
        step_s_p95: the step that 5 % of steps exceed.
        phases: seconds of the mean step by phase, mean over ranks.
        busy_cores: cores of a node that the ranks' threads used.
        peak_memory_bytes: of the largest rank.
        reduced_bytes: that a rank gave to collectives.
        reduced_bytes_per_s: rate of the costliest class of collectives; 0 without.
        scores: numbers of the script's result file.
        is_planned: whether the run is comparable with the plan that it followed.
        foreign_cores: cores that other processes used meanwhile; None where the kernel does not
            say.
    """

    key: str
    name: str
    ranks: int
    settings: dict[str, str]
    repeat: int
    run: str
    elapsed_s: float
    failure: str = ""
    throughput: float = 0.0
    steps: int = 0
    step_s: float = 0.0
    step_s_p95: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    busy_cores: float = 0.0
    peak_memory_bytes: int = 0
    reduced_bytes: float = 0.0
    reduced_bytes_per_s: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    is_planned: bool = False
    foreign_cores: float | None = None


class SweepLog:
    """The folder of a sweep, held by one process at a time. Use it in a `with` block.

    Attributes:
        folder: of the sweep.
        runs: that the log holds, in the order in which they ended.
    """

    def __init__(self, folder: Path, common: dict[str, Any]) -> None:
        """Make the folder, or open one of the same sweep.

        Args:
            folder: to write.
            common: JSON data that all runs of the sweep have in common.

        Raises:
            DestinationExists: it holds something else, or the sweep of something else.
            UsageError: another process sweeps there.
            ConfigError: a line of the log is damaged, other than a last one that was cut short.
            StorageError: it cannot be made or written.
        """
        self.folder = folder
        self._path = folder / LOG_NAME
        with storage_errors("cannot make the sweep's folder", where=folder, fix="Choose another"):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if try_lock(self._lock) is LockOutcome.HELD:
                raise UsageError(
                    "another process runs this sweep",
                    where=str(folder),
                    fix="Wait for it, stop it, or choose another folder with --out",
                )
            _check_common(folder, common)
            (folder / RUNS_NAME).mkdir(exist_ok=True)
            self.runs = list(_read(self._path))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process go on with the sweep."""
        os.close(self._lock)

    def add(self, run: CellRun) -> None:
        """Append the run of a cell, durably. Errors as `append_lines`."""
        append_lines(self._path, [json.dumps(run.to_json(), separators=(",", ":"))])
        self.runs.append(run)

    def ended(self, cell: Cell) -> list[CellRun]:
        """Return the runs of a cell that came to their end.

        The settings decide, not the name: it depends on which other values a sweep has.
        """
        return [run for run in self._of(cell) if not run.failure]

    def failure(self, cell: Cell) -> str:
        """Return why a cell did not run the last time; empty if it did, or was not run."""
        runs = self._of(cell)
        return runs[-1].failure if runs else ""

    def _of(self, cell: Cell) -> list[CellRun]:
        wanted = (cell.ranks, dict(cell.settings))
        return [run for run in self.runs if (run.ranks, run.settings) == wanted]


def _check_common(folder: Path, common: dict[str, Any]) -> None:
    """Write what the runs have in common, or see that it is what an earlier sweep wrote."""
    path = folder / SWEEP_NAME
    if not path.exists():
        if any(folder.iterdir()):
            raise DestinationExists(
                "the folder is not empty, and holds no sweep",
                where=str(folder),
                fix="Choose another with --out, or remove it",
            )
        commit_text(path, json.dumps(common, indent=1) + "\n")
        return
    try:
        before = json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise ConfigError(
            "not valid JSON", where=str(path), why=str(problem), fix="Choose another with --out"
        ) from None
    differs = [name for name in common if before.get(name) != common[name]]
    if differs:
        name = differs[0]
        raise DestinationExists(
            f"the folder has a sweep with another {name}",
            where=str(path),
            why=f"{name} was {before.get(name)!r}, and is now {common[name]!r}",
            fix="Repeat the command that began it, or choose another folder with --out",
        )


def _read(path: Path) -> Iterator[CellRun]:
    if not path.exists():
        return
    text = read_text(path)
    lines = text.split("\n")
    if lines.pop():  # what follows the last newline: a line that was cut short
        commit_text(path, "".join(f"{line}\n" for line in lines))
    for number, line in enumerate(lines, 1):
        yield CellRun.from_text(line, where=f"{path}:{number}")
