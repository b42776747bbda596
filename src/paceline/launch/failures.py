"""Which rank failed first, and what to say of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.core.errors import Interrupted, PacelineError, RankLost, ScriptFailed
from paceline.launch.result import Failure
from paceline.trace.files import read_status, trace_name

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.launch.processes import Exit


def first_failure(run: Path, exits: tuple[Exit, ...]) -> Failure | None:
    """Return the failure that came first: the others are its consequences.

    A rank killed by a signal breaks its peers' connections, and they raise before anybody noticed
    the kill; a rank that raises breaks them too, but wrote down when. The agent ends with SIGTERM
    who is left: only when that is the first exit did somebody else send it.
    """
    reports = sorted(_failure_reports(run), key=lambda report: int(report["at_ns"]))
    raised = {int(report["rank"]) for report in reports}  # such a rank may crash on its way out
    killed = [
        one
        for i, one in enumerate(exits)
        if one.rank >= 0
        and one.signal
        and (one.signal != "SIGTERM" or i == 0)
        and one.rank not in raised
    ]
    if killed:
        rank, signal_name, error = killed[0].rank, killed[0].signal, ""
    elif reports:
        rank, signal_name, error = int(reports[0]["rank"]), "", str(reports[0]["error"])
    elif exits and exits[0].rank >= 0:
        rank, signal_name, error = exits[0].rank, exits[0].signal, f"exit code {exits[0].code}"
    else:
        return None
    path = run / "trace" / trace_name(rank)
    try:
        status = read_status(path)
    except (PacelineError, OSError):  # it ended before its recorder began
        return Failure(rank=rank, signal=signal_name, error=error)
    return Failure(
        rank=rank,
        signal=signal_name,
        step=status.step,
        phase="waiting" if status.phase_name == "wait" else status.phase_name,
        error=error,
    )


def _failure_reports(run: Path) -> list[dict[str, Any]]:
    reports = []
    for path in (run / "trace").glob("rank-*.failure"):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError):  # cut short by a full disk
            continue
    return reports


def exit_code(exits: tuple[Exit, ...], failure: Failure | None) -> int:
    """Return the run's exit code, as design.md lists them."""
    if any(one.rank < 0 for one in exits):
        return Interrupted.exit_code
    if failure is None:
        return 0
    return RankLost.exit_code if failure.signal else ScriptFailed.exit_code


def raise_failure(
    run: Path, script: Path, exits: tuple[Exit, ...], failure: Failure | None
) -> None:
    """Raise what the exits amount to; nothing when all ranks ended well.

    Raises:
        Interrupted: a signal stopped the launcher.
        RankLost: a rank was killed.
        ScriptFailed: a rank's script raised.
    """
    for one in exits:
        if one.rank < 0:
            raise Interrupted(
                f"the run was stopped by {one.signal}",
                where=str(run),
                why="all ranks were stopped; the traces are kept",
                fix=f"See how far it came: paceline report {run}",
            )
    if failure is None:
        return
    if failure.signal:
        raise RankLost(
            f"rank {failure.rank} was killed by {failure.signal}",
            where=f"step {failure.step}, in {failure.phase}",
            why=_why_killed(failure.signal),
            fix=f"See what led to it: paceline report {run}",
        )
    raise ScriptFailed(
        f"rank {failure.rank} failed first, in step {failure.step} ({failure.phase})",
        where=str(script),
        why=failure.error,
        fix="See the traceback above",
    )


def _why_killed(signal_name: str) -> str:
    if signal_name == "SIGKILL":
        return "somebody killed it, or the kernel did for want of memory (see dmesg)"
    if signal_name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"):
        return "native code crashed"
    return "a signal ended it"


def tracebacks(run: Path) -> list[str]:
    """Return the tracebacks of ranks whose script raised, the first to fail first."""
    reports = sorted(_failure_reports(run), key=lambda report: int(report["at_ns"]))
    return [f"rank {report['rank']}:\n{report['traceback']}" for report in reports]
