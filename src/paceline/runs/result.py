"""``result.json`` of a run: the summary that other subcommands and tools read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.record import Record
from paceline.runs.balance import Balance
from paceline.trace.analysis.blame import Straggler
from paceline.trace.analysis.host import HostTime
from paceline.trace.analysis.nans import NanValue
from paceline.trace.analysis.shifts import Shift


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime(Record):
    """Seconds of one phase, summed over a rank's loop."""

    name: str
    measured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse(Record):
    """What holding a rank's memory budget took; per step, of the steps under a plan.

    Attributes:
        budget_bytes: that the process was to stay under; freed memory that is kept may fill it.
        predicted_peak_bytes: of the memory in use, as planned; None without a plan.
        peak_used_bytes: the most that was in use in a step under the plan; None without one.
        planned_steps: number of steps under a plan.
        spilled_bytes: written; as many are read.
        transfer_s: seconds that the disk was busy with them.
        exposed_s: the part of it that the step waited for.
        page_faults: pages that the step took from the system.
        corrected: how often the disk was slower than planned, and steps were planned again.
    """

    budget_bytes: int
    predicted_peak_bytes: int | None = None
    peak_used_bytes: int | None = None
    planned_steps: int = 0
    spilled_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    page_faults: float = 0.0
    corrected: int = 0


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
        host: the script's own work between phases by name, the longest first.
        memory: with ``memory_budget_bytes``, what holding it took.
    """

    rank: int
    steps: int
    loop_wall_s: float
    peak_memory_bytes: int
    phases: tuple[PhaseTime, ...]
    dropped_count: int = 0
    host: tuple[HostTime, ...] = ()
    memory: MemoryUse | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Record):
    """The rank that failed first.

    Attributes:
        rank: the global rank.
        signal: that killed it or its child, or empty when its script raised.
        step: in which it ended.
        phase: of that step.
        error: the exception, for a script that raised; what the child did, if it was one.
        child: a process of the rank whose end was the cause, such as ``a loader worker``; empty if
            it was the rank itself.
    """

    rank: int
    signal: str = ""
    step: int = 0
    phase: str = "other"
    error: str = ""
    child: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult(Record):
    """The summary of a run; seconds are measured, see docs/reference/run-folder.md.

    `straggler` is the costliest of `stragglers`; results of before hold it alone.
    `step_rule` is a value of `paceline.trace.merge.steps.StepRule`: what ends a step. `nan` is the
    first value that was not a number when the script read it from a tensor. `balance` is what
    rebalancing did; None where it was not asked for.
    """

    kind: Literal["run"] = "run"
    exit_code: int
    world_size: int
    step_time_s: float
    loop_wall_s: float
    ranks: tuple[RankResult, ...]
    straggler: Straggler | None = None
    stragglers: tuple[Straggler, ...] = ()
    shifts: tuple[Shift, ...] = ()
    failure: Failure | None = None
    step_rule: str = ""
    nan: NanValue | None = None
    balance: Balance | None = None
