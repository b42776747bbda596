"""How a rank's process ended, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from paceline.core.errors import Interrupted, RankLost
from paceline.core.processes import signal_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.processes import StopRequested


class ExitOutcome(StrEnum):
    """Why a rank's process ended."""

    ENDED = "ended"  # by itself, or killed from outside: code and signal say how
    STOPPED = "stopped"  # by its launcher, because another rank had failed
    INTERRUPTED = "interrupted"  # by its launcher, because that received a stop signal
    LOST = "lost"  # its task stopped reporting


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How a rank's process ended.

    Attributes:
        rank: the global rank; None for a launcher that has all ranks and was interrupted.
        code: exit code of the process.
        signal: name of the signal that killed the process or interrupted its launcher; else empty.
        outcome: why the process ended.
        at_s: time of the end, seconds since 1970; 0 when not known.
    """

    rank: int | None
    code: int
    signal: str = ""
    outcome: ExitOutcome = ExitOutcome.ENDED
    at_s: float = 0.0


def exit_of(rank: int, code: int, *, stopped: bool = False, at_s: float = 0.0) -> RankExit:
    """Return the exit of a process whose return code is `code`, negative for a signal."""
    return RankExit(
        rank=rank,
        code=code,
        signal=signal_name(-code) if code < 0 else "",
        outcome=ExitOutcome.STOPPED if stopped and code else ExitOutcome.ENDED,
        at_s=at_s,
    )


def interrupted_exit(rank: int | None, stop: StopRequested, at_s: float) -> RankExit:
    """Return the exit of a rank, or of all ranks (None), whose launcher was asked to stop."""
    return RankExit(
        rank=rank,
        code=Interrupted.exit_code,
        signal=stop.signal,
        outcome=ExitOutcome.INTERRUPTED,
        at_s=at_s,
    )


def lost_exit(rank: int) -> RankExit:
    """Return the exit of a rank whose task stopped reporting."""
    return RankExit(rank=rank, code=RankLost.exit_code, outcome=ExitOutcome.LOST)


def interruption(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the exit that says that the run was interrupted; None if it was not."""
    return next((ended for ended in exits if ended.outcome is ExitOutcome.INTERRUPTED), None)


def explaining_exits(exits: Iterable[RankExit], lost: Iterable[int] = ()) -> tuple[RankExit, ...]:
    """Return the exits that explain how a run ended, by time; empty if every rank succeeded.

    An interruption that came first explains all others. Else ranks that were stopped or interrupted
    are consequences of a rank that failed, and are left out unless nothing else is known. Ranks
    that had left with exit code 0 before come last: other ranks may have needed them.

    Args:
        exits: the exits of the ranks whose tasks reported them.
        lost: ranks whose tasks stopped reporting.
    """
    exits = tuple(exits)
    bad = sorted((ended for ended in exits if ended.code), key=lambda ended: ended.at_s)
    if bad and bad[0].outcome is ExitOutcome.INTERRUPTED:
        return (bad[0],)
    causes = [ended for ended in bad if ended.outcome is ExitOutcome.ENDED]
    causes += [lost_exit(rank) for rank in lost]
    first_s = max((cause.at_s for cause in causes[:1]), default=0.0)
    left = [ended for ended in exits if not ended.code and 0 < ended.at_s <= first_s]
    return (*(causes or bad), *sorted(left, key=lambda ended: ended.at_s))
