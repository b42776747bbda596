"""Finds the rank that failed first, and the error that the run ends with."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import (
    DeadlineExceeded,
    Interrupted,
    PacelineError,
    Preempted,
    RankLost,
    ScriptFailed,
)
from paceline.launch.exits import ExitOutcome, interruption
from paceline.launch.failure_report import read_reports
from paceline.launch.hangs.watch import mismatched_rank
from paceline.launch.summary import place_of, trace_statuses
from paceline.launch.unlike_payloads import unlike_payloads
from paceline.runs.folder import RunFolder
from paceline.runs.hang import HANG_NAME, Hang
from paceline.runs.result import Failure
from paceline.trace.format.events import MAIN, Kind
from paceline.trace.format.files import read_status, read_trace, trace_name

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.launch.exits import RankExit


_OOM = "the control group's OOM killer ended it: its memory limit was reached"
_LOST = "its task stopped reporting"
LEFT_EARLY = "left with exit code 0"
LEFT_SILENTLY = "left without an exception"  # below a launcher that does not tell exit codes
UNCLOSED = "ended without closing its trace: it was killed, or left by os._exit"
HUNG = "hung"
WORKED = "worked"  # for longer than others wait
UNLIKE = "the ranks gave unlike tensors"
MISMATCHED = "called another collective than the other ranks"
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
# Words in the traceback of a rank that lost a peer: errors of gloo, NCCL and torch's own store.
# "RankLost" is Paceline's own backend.
LOST_A_PEER = re.compile(
    r"gloo/transport|NCCL|DistNetworkError|DistStoreError|DistBackendError"
    r"|RankLost: rank \d+ is gone"
)
_MISMATCH = "CollectiveMismatch: "  # as Paceline's backend raises it on all ranks
_WORK = (  # what a rank records when it ends; a rank that is blocked in one of them records nothing
    *(Kind.INPUT, Kind.COPY, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER),
    *(Kind.CHECKPOINT, Kind.EVALUATION, Kind.HOST, Kind.COMPILATION),
)
# Of gloo, where it does not abort, and of torch.
_SIZES = re.compile(r"data size doesn't match|op\.preamble\.length|invalid tensor size")
_TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")


def first_failure(run: Path, exits: tuple[RankExit, ...]) -> Failure | None:
    """Return the failure that came first: the others are its consequences.

    A rank that is killed breaks its peers' connections, and they raise before the kill is noticed;
    a rank that raises breaks them, too, but its failure report carries the time at which it raised.
    A rank that leaves with exit code 0 breaks them as well: if all that raised lost a peer, and no
    rank was killed, the first rank to leave is the cause; if they lost it to a timeout, a rank that
    hangs is, or one that worked for longer than that. The death of a child process comes before
    what its parent raises, and that before what ranks raise that lost a peer, whichever noticed
    first. A signal counts only if it ended a rank before any other rank failed, unless it is a
    crash: launchers end ranks by signals.

    Args:
        run: the run's folder.
        exits: of the ranks that did not end well, and of those that left before them, in order of
            time within each part.
    """
    reports = _by_cause(run)
    raised = {int(report["rank"]) for report in reports}  # such a rank may crash on its way out
    bad = [ended for ended in exits if ended.code]
    silent = [
        ended
        for ended in bad
        if ended.outcome is not ExitOutcome.INTERRUPTED and ended.rank not in raised
    ]
    all_lost_a_peer = all(_lost(report) for report in reports)
    if not all_lost_a_peer:
        silent = [
            ended
            for ended in silent
            if ended.signal in _CRASHES or (ended.signal and ended is bad[0])
        ]
    if silent:
        return _silent_failure(run, silent[0])
    if not reports:
        return None
    may_be_unlike = all_lost_a_peer or _SIZES.search(str(reports[0]["traceback"]))
    if may_be_unlike and (unlike := unlike_payloads(run)):
        failure = failure_of(run, reports[0])
        return dataclasses.replace(failure, error=f"{UNLIKE}: {unlike}")
    if all(str(report["error"]).startswith(_MISMATCH) for report in reports):
        odd = mismatched_rank(run)  # all ranks have raised, and at the same time
        reports.sort(key=lambda report: int(report["rank"]) != odd)
    if all_lost_a_peer:
        left = [ended for ended in exits if not ended.code and ended.rank is not None]
        if left:
            assert left[0].rank is not None
            return early_leave(run, left[0].rank, int(reports[0]["rank"]), LEFT_EARLY)
        if hung := _hung(run, reports, exits):
            return hung
    return failure_of(run, reports[0])


def _by_cause(run: Path) -> list[dict[str, Any]]:
    """Return the failure reports, causes before consequences, in order of time within each kind."""
    return sorted(read_reports(run), key=lambda report: (not report.get("child"), _lost(report)))


def _lost(report: dict[str, Any]) -> bool:
    """Return whether a rank raised because another one had gone."""
    return not report.get("child") and bool(LOST_A_PEER.search(str(report["traceback"])))


def hang_failure(run: Path) -> Failure | None:
    """Return the failure of the rank that the launcher found to hang; None if it found none."""
    try:
        hang = RunFolder(run).read_record(Hang, HANG_NAME)
    except PacelineError:  # cut short by a full disk
        return None
    if hang is None:
        return None
    # What it did then: since, the launcher has ended it.
    step, phase = (hang.step, hang.phase) if hang.phase else _place(run, hang.rank)
    return Failure(rank=hang.rank, step=step, phase=phase, error=f"{HUNG}: {hang.detail}")


def mismatch_failure(run: Path) -> Failure | None:
    """Return the failure of the rank that called another collective than the others, if one did."""
    rank = mismatched_rank(run)
    if rank is None:
        return None
    step, phase = _place(run, rank)
    return Failure(rank=rank, step=step, phase=phase, error=MISMATCHED)


def failure_of(run: Path, report: dict[str, Any]) -> Failure:
    """Return the failure that a rank's report is about."""
    rank = int(report["rank"])
    step, phase = _place(run, rank)
    # The exception has left its phase: the report holds the phase.
    phase = str(report["phase"]) or phase
    if child := report.get("child"):
        return Failure(
            rank=rank,
            signal=str(child["signal"]),
            step=step,
            phase=phase,
            error=_OOM
            if child["by_oom"]
            else ""
            if child["signal"]
            else f"exit code {child['code']}",
            child=str(child["name"]),
        )
    return Failure(rank=rank, step=step, phase=phase, error=str(report["error"]))


def _silent_failure(run: Path, ended: RankExit) -> Failure:
    """Return the failure of a rank that ended badly without a report."""
    assert ended.rank is not None
    step, phase = _place(run, ended.rank)
    error = "" if ended.signal else f"exit code {ended.code}"
    error = _LOST if ended.outcome is ExitOutcome.LOST else error
    if ended.signal == "SIGABRT" and (unlike := unlike_payloads(run)):  # as gloo ends a rank
        error = f"{UNLIKE}: {unlike}"
    return Failure(rank=ended.rank, signal=ended.signal, step=step, phase=phase, error=error)


def early_leave(run: Path, rank: int, victim: int, how: str) -> Failure:
    """Return the failure of a rank that ended by itself, but before others that then lost it.

    Args:
        run: the run's folder.
        rank: the rank that left.
        victim: a rank that lost it.
        how: it left: `LEFT_EARLY` or `LEFT_SILENTLY`.
    """
    step, phase = _place(run, rank)
    error = f"{how} while rank {victim} still needed it"
    return Failure(rank=rank, step=step, phase=phase, error=error)


def _hung(run: Path, reports: list[dict[str, Any]], exits: tuple[RankExit, ...]) -> Failure | None:
    """Return the failure of a rank that others waited for until a timeout; None if there is none.

    It neither raised nor ended by itself: its launcher stopped it, somewhere other than in a wait.
    """
    if not all(_TIMED_OUT.search(str(report["traceback"])) for report in reports):
        return None
    known = {int(report["rank"]) for report in reports} | {ended.rank for ended in exits}
    for status in trace_statuses(run):
        if status.rank not in known and status.phase is not Kind.WAIT:
            step, phase = _place(run, status.rank)
            victim = int(reports[0]["rank"])
            what = WORKED if _worked(run, status.rank, victim) else HUNG
            error = f"{what}: rank {victim} waited for it until the timeout"
            return Failure(rank=status.rank, step=step, phase=phase, error=error)
    return None


def _worked(run: Path, rank: int, victim: int) -> bool:
    """Return whether a rank recorded work in the second half of another one's last wait.

    Of ranks of one node, whose traces have one clock; a rank that computes in one call for so long
    records nothing.
    """
    try:
        own, waiting = (read_trace(run / "trace" / trace_name(number)) for number in (rank, victim))
    except (PacelineError, OSError):
        return False
    waits = waiting.events_of(Kind.WAIT)
    if own.status.boot_id != waiting.status.boot_id or not len(waits):
        return False
    last = waits[int(waits["end_ns"].argmax())]
    half_ns = (int(last["begin_ns"]) + int(last["end_ns"])) // 2
    work = own.events[(own.events["location"] == MAIN) & np.isin(own.events["kind"], _WORK)]
    return bool((work["end_ns"] > half_ns).any())


def _place(run: Path, rank: int) -> tuple[int, str]:
    """Return the step and phase in which a rank ended, according to its trace."""
    try:
        status = read_status(run / "trace" / trace_name(rank))
    except (PacelineError, OSError):  # it ended before its recorder began
        return 0, "other"
    return place_of(status)


def exit_code(exits: tuple[RankExit, ...], failure: Failure | None) -> int:
    """Return the run's exit code, as docs/reference/exit-codes.md lists them."""
    if interruption(exits):
        return Interrupted.exit_code
    if _preempted(exits):
        return Preempted.exit_code
    if failure is None:
        return 0
    if failure.error.startswith(UNLIKE):
        return ScriptFailed.exit_code
    lost = failure.signal or failure.error in (_LOST, UNCLOSED) or failure.error.startswith(HUNG)
    return RankLost.exit_code if lost else ScriptFailed.exit_code


def raise_failure(
    run: Path,
    program: str,
    exits: tuple[RankExit, ...],
    failure: Failure | None,
    command: str = "",
) -> None:
    """Raise the error for the exits of a run; do nothing if every rank succeeded.

    Args:
        run: the run's folder.
        program: the name of what its ranks execute.
        exits: of its ranks.
        failure: that came first.
        command: by which the program of a run of one rank is started without RANK and WORLD_SIZE;
            empty where that is no question.

    Raises:
        Interrupted: a signal stopped the launcher.
        Preempted: all ranks asked to be started again.
        RankLost: a rank was killed, or hung.
        DeadlineExceeded: a rank's task stopped reporting.
        ScriptFailed: a rank's script raised.
    """
    if interrupted := interruption(exits):
        raise Interrupted(
            f"the run was stopped by {interrupted.signal or 'a signal'}",
            where=str(run),
            why="all ranks were stopped; the traces are kept",
            fix=f"See how far it came: paceline report {run}",
        )
    if _preempted(exits):
        raise Preempted(
            "the run was preempted",
            where=str(run),
            why=f"its ranks ended with exit code {Preempted.exit_code}; the traces are kept",
            fix="Start it again: it goes on from its checkpoint",
        )
    if failure is not None:
        raise _loss(run, failure) or _script_failure(run, program, failure, command)


def _preempted(exits: tuple[RankExit, ...]) -> bool:
    """Whether no rank failed, but ranks asked to be started again."""
    codes = {ended.code for ended in exits} - {0}
    return codes == {Preempted.exit_code}


def _loss(run: Path, failure: Failure) -> PacelineError | None:
    """Return the error for a rank that was killed, hung or is lost; None if its script failed."""
    where = f"step {failure.step}, phase {failure.phase}"
    kind, _, why = failure.error.partition(": ")
    who = f"{failure.child} of rank {failure.rank}" if failure.child else f"rank {failure.rank}"
    if kind == UNLIKE:
        return ScriptFailed(
            f"{UNLIKE} to a collective",
            where=where,
            why=f"{why}; {who} {'was ended by ' + failure.signal if failure.signal else 'raised'}",
            fix="Give tensors of one size and type on all ranks: pad them, or exchange their sizes "
            "first",
        )
    if failure.signal:
        return RankLost(
            f"{who} was killed by {failure.signal}",
            where=where,
            why=failure.error or _why_killed(failure.signal),
            fix=f"See the steps before it: paceline report {run}",
        )
    if failure.error == UNCLOSED:
        return RankLost(
            f"rank {failure.rank} {kind}",
            where=where,
            why=f"{why}; under `paceline record` the command that started the rank does not "
            "report which",
            fix=f"See the command's output, and the steps before it: paceline report {run}",
        )
    if kind == HUNG:
        return RankLost(
            f"rank {failure.rank} hung",
            where=where,
            why=why,
            fix=f"See the stacks of all ranks: {run / HANG_NAME}"
            if (run / HANG_NAME).exists()
            else "See what it does there: start the run again, with a --hang-timeout below the "
            "timeout of the collective",
        )
    if failure.error == _LOST:
        return DeadlineExceeded(
            f"rank {failure.rank} is lost",
            where=where,
            why="its task stopped reporting: it was killed, or its node failed",
            fix=f"See its output, and what led to it: paceline report {run}",
        )
    return None


def _script_failure(run: Path, program: str, failure: Failure, command: str) -> ScriptFailed:
    if failure.error.startswith((LEFT_EARLY, LEFT_SILENTLY)):
        return ScriptFailed(
            f"rank {failure.rank} {failure.error}",
            where=f"{program}, after step {failure.step}",
            why="the other ranks wait in a collective that this rank never enters",
            fix="Give all ranks the same number of steps, or train with DDP's join()",
        )
    if failure.child:
        return ScriptFailed(
            f"{failure.child} of rank {failure.rank} ended with {failure.error}",
            where=f"{program}, in step {failure.step} ({failure.phase})",
            fix=f"See what it printed, and the steps before it: paceline report {run}",
        )
    if failure.error.startswith(WORKED):
        return ScriptFailed(
            f"rank {failure.rank} worked for longer than the timeout of the process group",
            where=f"{program}, step {failure.step} ({failure.phase})",
            why=failure.error.partition(": ")[2],
            fix="Give the group a longer one, init_process_group(timeout=timedelta(...)), or all "
            "ranks a part of that work",
        )
    has_traceback = any(
        report["traceback"] and int(report["rank"]) == failure.rank for report in read_reports(run)
    )
    alone = ""
    if command and failure.step == 0:
        alone = (
            ". If the script goes another way where RANK and WORLD_SIZE are set, as by torchrun: "
            f"paceline record -- {command}"
        )
    return ScriptFailed(
        f"rank {failure.rank} failed first, in step {failure.step} ({failure.phase})",
        where=program,
        why=failure.error,
        fix=f"See {'the traceback above' if has_traceback else 'what the rank printed'}, and the "
        f"steps before it: paceline report {run}{alone}",
    )


def _why_killed(signal_name: str) -> str:
    if signal_name == "SIGKILL":
        return "often by the kernel's OOM killer, which dmesg would show"
    if signal_name in _CRASHES:
        return "native code crashed"
    return "another process sent the signal"


def first_traceback(run: Path) -> str:
    """Return the traceback of the rank whose script raised first; empty if it exited."""
    for report in _by_cause(run):
        return f"rank {report['rank']}:\n{report['traceback']}" if report["traceback"] else ""
    return ""
