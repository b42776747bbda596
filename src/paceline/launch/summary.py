"""Turns the traces of a run into its result."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING

from paceline.core.errors import CorruptTrace, NotFound, PacelineError
from paceline.launch.recordable import script_line
from paceline.runs.balance import read_balance
from paceline.runs.folder import RunFolder
from paceline.runs.result import MemoryUse, PhaseTime, RankResult, RunResult
from paceline.trace.analysis import Analysis, analyse
from paceline.trace.format.files import read_status
from paceline.trace.merge import load_run

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.runs.result import Failure
    from paceline.trace.format.header import Status


def summarize(run: Path, ranks: int, exit_code: int, failure: Failure | None = None) -> RunResult:
    """Return the result that the traces in folder `run` give.

    It is without measurements when nothing was recorded, or a trace is damaged: how the ranks ended
    does not depend on that.

    Args:
        run: the run's folder.
        ranks: number of ranks that the launcher started.
        exit_code: of the run.
        failure: of the rank that failed first; None if none did.
    """
    try:
        trace = load_run(run)
    except (NotFound, CorruptTrace):  # `trace_warnings` says what is damaged
        return RunResult(
            exit_code=exit_code,
            world_size=ranks,
            step_time_s=0.0,
            loop_wall_s=0.0,
            ranks=(),
            failure=failure,
            balance=read_balance(run),
        )
    analysis = analyse(trace)
    return RunResult(
        exit_code=exit_code,
        world_size=max(ranks, trace.world_size),  # a script may have started ranks itself
        step_time_s=analysis.step_time_s,
        loop_wall_s=max(rank.loop_wall_s for rank in analysis.phases),
        ranks=_rank_results(analysis, run),
        straggler=analysis.stragglers[0] if analysis.stragglers else None,
        stragglers=analysis.stragglers,
        shifts=analysis.shifts,
        failure=_in_loop_steps(analysis, failure),
        step_rule=analysis.step_rule,
        nan=analysis.nan,
        balance=read_balance(run),
    )


def _in_loop_steps(analysis: Analysis, failure: Failure | None) -> Failure | None:
    """Return the failure with its step in steps of the loop: the trace's header counts marks."""
    for rank in analysis.trace.ranks:
        if failure is not None and rank.rank == failure.rank:
            step = max(0, failure.step - rank.marks_within_steps)
            return dataclasses.replace(failure, step=step)
    return failure


def trace_warnings(run: Path) -> tuple[str, ...]:
    """Return one line for each rank whose trace in folder `run` lost events, or is not there.

    And one if the run ended, and its traces gave no measurements because they are damaged.
    """
    lines = list(_why_unmeasured(run))
    statuses = trace_statuses(run)
    for status in statuses:
        if status.error or status.dropped_count:
            why = os.strerror(status.error) if status.error else "events came too fast"
            lines.append(
                f"the trace of rank {status.rank} lacks {status.dropped_count} events: {why}"
            )
    world_size = max((status.world_size for status in statuses), default=0)
    missing = sorted(set(range(world_size)) - {status.rank for status in statuses})
    if missing:
        lines.append(
            f"{len(missing)} of {world_size} ranks left no trace here (first: {missing[0]}): if "
            f"they ran on another node, copy its traces into {run / 'trace'}"
        )
    return tuple(lines)


def recording_warnings(run: Path) -> tuple[str, ...]:
    """Return a line if no rank of a command or program was recorded in folder `run`."""
    if trace_statuses(run):
        return ()
    return (
        "no rank was recorded: no Python process below the command joined a process group of "
        "torch or ran backward, and no program of a known MPI called MPI_Init. If processes were "
        "started elsewhere (a container, ssh), put "
        f"this line into the script: {script_line(run)}",
    )


def _why_unmeasured(run: Path) -> tuple[str, ...]:
    result = RunFolder(run).read_result()
    if result is None or result.ranks:
        return ()
    try:
        load_run(run)
    except NotFound:
        return ()
    except PacelineError as problem:
        return (f"the run has no measurements: {problem.what} ({problem.where})",)
    return ()


def trace_statuses(run: Path) -> list[Status]:
    """Return the headers of the traces in folder `run` that can be read, ordered by rank."""
    statuses = []
    for path in sorted((run / "trace").glob("rank-*.trace")):
        try:
            statuses.append(read_status(path))
        except (PacelineError, OSError):  # damaged, or hardly begun: its reader says so
            continue
    return statuses


def _rank_results(analysis: Analysis, run: Path) -> tuple[RankResult, ...]:
    return tuple(
        RankResult(
            rank=phases.rank,
            steps=phases.steps,
            loop_wall_s=phases.loop_wall_s,
            peak_memory_bytes=rank.status.peak_memory_bytes,
            phases=tuple(
                PhaseTime(name=name, measured_s=seconds)
                for name, seconds in phases.breakdown().items()
            ),
            dropped_count=rank.status.dropped_count,
            host=phases.host,
            memory=_memory_use(run, phases.rank),
        )
        for rank, phases in zip(analysis.trace.ranks, analysis.phases, strict=True)
    )


def _memory_use(run: Path, rank: int) -> MemoryUse | None:
    """Return what a rank's worker wrote of its memory budget; None without one."""
    try:
        data = json.loads((run / "memory" / f"rank-{rank:05}.json").read_bytes())
    except (OSError, ValueError):  # without a budget, or killed
        return None
    plan = data["plan"]
    return MemoryUse(
        budget_bytes=data["budget_bytes"],
        predicted_peak_bytes=data["predicted_peak_bytes"],
        peak_used_bytes=data["peak_used_bytes"],
        planned_steps=data["planned_steps"],
        spilled_bytes=plan["spilled_bytes"] if plan else 0,
        transfer_s=data["transfer_s"],
        exposed_s=data["exposed_s"],
        page_faults=data["page_faults"],
        corrected=data["corrected"],
    )


def place_of(status: Status) -> tuple[int, str]:
    """Return the step and phase of a trace's header, as a `Failure` has them."""
    return status.step, "waiting" if status.phase_name == "wait" else status.phase_name
