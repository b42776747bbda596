"""What a run leaves as ``result.json``: the summary that later verbs and other tools read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline.core.errors import ConfigError, CorruptData, NewerFormat, NotFound
from paceline.core.files import read_text
from paceline.core.record import Record
from paceline.trace.blame import Straggler

if TYPE_CHECKING:
    from pathlib import Path

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime(Record):
    """Seconds of one phase, summed over a rank's loop."""

    name: str
    measured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult(Record):
    """One rank's part of a run.

    Attributes:
        rank: the global rank.
        steps: that it completed.
        loop_wall_s: from the first phase of its loop to the end of its last step.
        peak_memory_bytes: high-water mark of the process's resident memory.
        phases: in the order of `Breakdown`.
        dropped_count: events that could not be recorded or written; 0 in a good run.
    """

    rank: int
    steps: int
    loop_wall_s: float
    peak_memory_bytes: int
    phases: tuple[PhaseTime, ...]
    dropped_count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Record):
    """The rank that failed first.

    Attributes:
        rank: the global rank.
        signal: that killed it, or empty when its script raised.
        step: in which it ended.
        phase: of that step.
        error: the exception, for a script that raised.
    """

    rank: int
    signal: str = ""
    step: int = 0
    phase: str = "other"
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult(Record):
    """The summary of a run; seconds are measured, see docs/reference/run-folder.md."""

    kind: Literal["run"] = "run"
    exit_code: int
    world_size: int
    step_time_s: float
    loop_wall_s: float
    ranks: tuple[RankResult, ...]
    straggler: Straggler | None = None
    failure: Failure | None = None


def run_folder(folder: Path) -> Path:
    """Return the folder of the run that the user named; the demo's folder stands for its run.

    Raises:
        NotFound: there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound("no such run", where=str(folder), fix="Give the folder of a run")
    inner = folder / "run"
    if inner.is_dir() and not (folder / "trace").exists():
        return inner if load_object(folder / "result.json").get("kind") == "demo" else folder
    return folder


def load_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run; empty without the file.

    Raises:
        CorruptData: it is not JSON.
    """
    if not path.exists():
        return {}
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise _not_understood(str(path), f"not valid JSON: {problem}") from problem
    return data if isinstance(data, dict) else {}


def load_result(run: Path) -> RunResult:
    """Return the result of the run in folder `run`; errors as in `load_record`."""
    return load_record(RunResult, run / "result.json")


def load_record(cls: type[R], path: Path) -> R:
    """Return the record that a file of a run holds.

    Raises:
        NotFound: there is no such file.
        NewerFormat: a newer Paceline wrote it; the error names that Paceline where the run does.
        CorruptData: it cannot be understood; nobody writes these files by hand.
    """
    text = read_text(path)
    try:
        return cls.from_text(text, where=str(path))
    except NewerFormat as problem:
        writer = load_object(path.parent / "versions.json").get("paceline")
        fix = f"Use Paceline {writer}, which wrote the run, or a newer one" if writer else ""
        raise NewerFormat(
            problem.what, where=problem.where, why=problem.why, fix=fix or problem.fix
        ) from None
    except ConfigError as problem:
        why = f"{problem.what}: {problem.why}" if problem.why else problem.what
        raise _not_understood(problem.where, why) from problem


def _not_understood(where: str, why: str) -> CorruptData:
    return CorruptData(
        "a file of the run cannot be understood",
        where=where,
        why=why,
        fix="Restore it, or move it away to do without it",
    )
