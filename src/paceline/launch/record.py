"""Runs a command that starts ranks by itself (torchrun, accelerate, ...) and records these ranks.

The command runs as it would run alone. Which of its processes are ranks turns out while it runs
(`attach`); what they leave is then the run's result, as under ``paceline run``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.collectives import registration
from paceline.collectives.options import CollectivesConfig
from paceline.core.config import Resolved, environment, resolve
from paceline.core.errors import RankLost, ScriptFailed
from paceline.core.files import commit_text
from paceline.core.plan import CollectivesChoice
from paceline.core.processes import (
    StopRequested,
    become_reaper,
    descendants,
    end_descendants,
    ended_on_signal,
)
from paceline.launch.attach import child_environment
from paceline.launch.child_memory import ChildMemoryWatcher
from paceline.launch.exits import explaining_exits, interrupted_exit
from paceline.launch.failure_report import read_reports
from paceline.launch.failures import (
    LEFT_SILENTLY,
    LOST_A_PEER,
    UNCLOSED,
    early_leave,
    exit_code,
    failure_of,
    hang_failure,
    mismatch_failure,
    raise_failure,
)
from paceline.launch.file_calls import file_call_variables
from paceline.launch.folder import claim, default_folder, refuse_taken, write_start
from paceline.launch.guard import STOP_SIGNAL
from paceline.launch.hangs.watch import HangWatcher
from paceline.launch.mpi import ProgramMpi, mpi_of_command
from paceline.launch.options import HANG_TIMEOUT_S, check_hang_timeout, check_profile_steps
from paceline.launch.ranks import SIGNAL_DELAY_S, LocalRanks
from paceline.launch.recordable import check_recordable
from paceline.launch.summary import place_of, summarize, trace_statuses
from paceline.runs.launcher import this_launcher
from paceline.runs.result import Failure
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.clock import Clock
    from paceline.core.machine import Machine
    from paceline.launch.exits import RankExit
    from paceline.runs.result import RunResult


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCommand:
    """A command that is ready to start: everything checked, nothing written yet.

    Attributes:
        command: program and arguments.
        run_folder: the folder that the run writes.
        is_default_name: the user gave no --out; if the name is taken, Paceline takes another.
        collectives_settings: the configuration of the backend ``paceline``.
        collectives: ``paceline`` gives the ranks that backend where they ask for gloo or for none.
        mpi: the MPI of the program, whose calls are recorded; None if it uses none.
        record_io: calls for files are recorded.
        profile_steps: as of `RunConfig`.
        hang_timeout_s: as of `RunConfig`.
    """

    command: tuple[str, ...]
    run_folder: Path
    is_default_name: bool
    collectives_settings: Resolved[CollectivesConfig]
    collectives: CollectivesChoice = "torch"
    mpi: ProgramMpi | None = None
    record_io: bool = False
    profile_steps: int = 0
    hang_timeout_s: float = HANG_TIMEOUT_S


def prepare_command(  # noqa: PLR0913  # a value for each option of the command line
    command: Sequence[str],
    run: Path | None,
    clock: Clock,
    *,
    collectives: CollectivesChoice = "torch",
    mpi: bool = False,
    record_io: bool | None = None,
    profile_steps: int = 0,
    stem: str = "",
    hang_timeout_s: float = HANG_TIMEOUT_S,
) -> RecordedCommand:
    """Check a command before anything is written or started.

    Args:
        command: program and arguments.
        run: the folder to write; None chooses one under ``paceline-runs``.
        clock: gives the time for the name of that folder.
        collectives: the backend of the ranks' collectives, as for `paceline run`.
        mpi: the command starts a program that uses MPI; without it only executables are looked at.
        record_io: whether to record calls for files, too; None: only of MPI programs.
        profile_steps: steps of which torch.profiler adds operators and kernels.
        stem: what the name of a default folder begins with; empty: the command's.
        hang_timeout_s: as of `RunConfig`.

    Raises:
        NotFound: there is no such program.
        UsageError: its ranks cannot be recorded from outside, its MPI is not known, or the timeout
            is not valid.
        Missing: the library that records MPI was not installed.
        DestinationExists: the folder is there and not empty.
        ConfigError: a setting of the backend ``paceline`` is not valid.
    """
    check_hang_timeout(hang_timeout_s)
    check_profile_steps(profile_steps)
    settings = resolve(CollectivesConfig)  # before the ranks find the same mistake
    folder = run or default_folder(stem or _stem(command), None, clock)
    check_recordable(command, folder)
    found = mpi_of_command(command, required=mpi)
    if found is not None:
        found.variables(folder, environment())  # that it is there
    refuse_taken(folder, 0)
    return RecordedCommand(
        command=tuple(command),
        run_folder=folder,
        is_default_name=run is None,
        collectives=collectives,
        collectives_settings=settings,
        mpi=found,
        record_io=found is not None if record_io is None else record_io,
        profile_steps=profile_steps,
        hang_timeout_s=hang_timeout_s,
    )


def claim_command_folder(job: RecordedCommand) -> RecordedCommand:
    """Make the run's folder, and return the command with it; see `folder.claim`."""
    run_folder = claim(job.run_folder, is_default_name=job.is_default_name)
    return dataclasses.replace(job, run_folder=run_folder)


def record_command(job: RecordedCommand, *, machine: Machine, clock: Clock) -> RunResult:
    """Run the command to its end, write the run's folder, and return its result.

    Args:
        job: what `claim_command_folder` returned.
        machine: the Machine that is written into the run's folder, as far as it is known.
        clock: the clock for waits and for the times of exits.

    Raises:
        ScriptFailed: the command failed; the message names the rank if that is known.
        RankLost: the command or a rank was killed.
        Interrupted: a signal stopped the run; traces are kept.
        StorageError: the folder cannot be written.
    """
    run = job.run_folder
    write_start(
        run,
        machine,
        values={},
        script=job.command[0],
        args=list(job.command[1:]),
        world_size=None,  # known at the end: in result.json
        threads=None,
        collectives=job.collectives,
        collectives_values=job.collectives_settings.to_json(),
        launcher=this_launcher(),
    )
    exits = _run(job, clock)
    interrupted = bool(exits) and exits[0].rank is None
    failure = None if interrupted else hang_failure(run)
    if failure is None and exits and not interrupted:
        failure = _failure(run, exits[0])
    code = exit_code(exits, failure)
    if exits and not code:
        code = _command_error(job.command[0], exits[0]).exit_code
    ranks = max((status.world_size for status in trace_statuses(run)), default=0)
    result = summarize(run, ranks, code, failure)
    commit_text(run / "result.json", result.to_text())
    raise_failure(run, job.command[0], exits, result.failure)
    if exits:
        raise _command_error(job.command[0], exits[0])
    return result


def _stem(command: Sequence[str]) -> str:
    """Return a short name for the run's folder: of the script, the module, or the program."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word.endswith(".py"):
            return Path(word).stem
        if word == "-m" and following:
            return following.rpartition(".")[2]
    return Path(command[0]).stem


def _run(job: RecordedCommand, clock: Clock) -> tuple[RankExit, ...]:
    """Run the command to its end; return its exit if it did not end well."""
    before = frozenset(descendants(os.getpid()))
    become_reaper()
    command = [sys.executable, "-m", "paceline.launch.guard", str(os.getpid()), *job.command]
    replaced = registration.variables(job.collectives)
    environ = {**environment(), **child_environment(job.run_folder, job.profile_steps), **replaced}
    if job.mpi is not None:
        environ |= job.mpi.variables(job.run_folder, environ)
    if job.record_io:
        environ |= file_call_variables(job.run_folder, environ)
    local = LocalRanks(clock, stop_signal=STOP_SIGNAL)
    hangs = HangWatcher(job.run_folder, clock, job.hang_timeout_s)
    try:
        with ended_on_signal(clock), ChildMemoryWatcher(job.run_folder, clock), hangs:
            try:
                local.start(0, command, environ)
                local.wait(hangs.stop_reason)
            except StopRequested as stop:
                local.stop(SIGNAL_DELAY_S)
                return (interrupted_exit(None, stop, clock.wall_s()),)
    finally:
        end_descendants(clock, before)
    exits = explaining_exits(local.exits())
    if not exits:
        hangs.look_back()
    return exits


def _failure(run: Path, ended: RankExit) -> Failure | None:
    """Return the failure that came first, from what the ranks left; None if they left nothing.

    A launcher that we do not know stops the other ranks, too, and does not tell us how each ended.
    A rank that raised has a report. A rank that left while others needed it closed its trace, and
    has taken no more steps than those that lost it. Of the ranks that vanished, the first to do so
    has the fewest steps, and does not wait: the others have waited for it.

    Args:
        run: the run's folder.
        ended: the end of the command; with a single trace it is the end of that rank.
    """
    reports = read_reports(run)
    own = [report for report in reports if not LOST_A_PEER.search(str(report["traceback"]))]
    if own:
        return failure_of(run, own[0])
    if mismatch := mismatch_failure(run):  # an MPI ends all ranks, not the wrong one alone
        return mismatch
    reported = {int(report["rank"]) for report in reports}
    statuses = trace_statuses(run)
    silent = [status for status in statuses if status.rank not in reported]
    silent.sort(key=lambda status: (status.step, status.phase is Kind.WAIT, status.rank))
    left = [status for status in silent if status.closed]
    fewest = min((status.step for status in statuses if status not in left), default=0)
    if reports and left and left[0].step <= fewest:
        return early_leave(run, left[0].rank, int(reports[0]["rank"]), LEFT_SILENTLY)
    killed = [status for status in silent if not status.closed]
    if killed:
        step, phase = place_of(killed[0])
        signal = ended.signal if len(statuses) == 1 else ""
        error = "" if signal else UNCLOSED
        return Failure(rank=killed[0].rank, step=step, phase=phase, signal=signal, error=error)
    return failure_of(run, reports[0]) if reports else None


def _command_error(program: str, ended: RankExit) -> RankLost | ScriptFailed:
    if ended.signal:
        return RankLost(
            f"{program} was killed by {ended.signal}",
            why="another process sent the signal, or the kernel for want of memory (dmesg)",
            fix="See its output",
        )
    return ScriptFailed(f"{program} ended with exit code {ended.code}", fix="See its output")
