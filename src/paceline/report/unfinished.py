"""What the ranks did after the last step that all of them completed, if that took long.

A run that hangs is stopped by somebody: a user, or the scheduler at its time limit. Its steps say
nothing of the hang, its last events do: most ranks wait in a collective that one has not entered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.report.units import format_seconds
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace

_LEAST_S, _LEAST_STEPS = 1.0, 20  # after the last step, to be worth a sentence
_MOST = 0.5  # of that time, in which a rank does one thing
_NAMED = 3
_COMMUNICATION = ((Kind.COLLECTIVE, Kind.SEND, Kind.RECV), (Kind.WAIT,))  # the first say more


@dataclass(frozen=True, slots=True)
class _Last:
    """What a rank did for most of the time after its last step."""

    rank: int
    activity: str  # a collective, a function of the script, a phase; empty if not known
    seconds: float  # of all the time after its last step
    waits: bool


def unfinished_words(ranks: Sequence[RankTrace], step_s: float) -> str:
    """Return the sentence about a step that did not end; empty if the run ended soon after a step.

    Args:
        ranks: traces of the run.
        step_s: median step time, seconds.
    """
    found = [_last_of(rank) for rank in ranks]
    longest_s = max((last.seconds for last in found), default=0.0)
    if longest_s < max(_LEAST_S, _LEAST_STEPS * step_s):
        return ""
    waiting = [last for last in found if last.waits]
    others = [last for last in found if not last.waits]
    after = f"The run ended {format_seconds(longest_s)} after its last step"
    if not waiting:
        return f"{after}: {_said(others)}."
    operations = sorted({last.activity for last in waiting})
    wait = f"{_ranks(waiting)} waited in {' and '.join(operations)}"
    if not others:
        return f"{after}: {wait}, and so did every rank."
    return f"{after}: {wait}, which {_ranks(others)} had not entered; {_said(others)}."


def _last_of(rank: RankTrace) -> _Last:
    """Return what a rank did after its last step; times of other ranks are not needed for it."""
    events = rank.events
    steps = events[events["kind"] == Kind.STEP]
    if not len(steps):
        return _Last(rank.rank, "", 0.0, waits=False)
    begin_ns = int(steps["end_ns"].max())
    later = events[(events["end_ns"] > begin_ns) & (events["kind"] != Kind.STEP)]
    seconds = (int(later["end_ns"].max()) - begin_ns) / 1e9 if len(later) else 0.0
    lasted_s = (later["end_ns"] - np.maximum(later["begin_ns"], begin_ns)) / 1e9
    for kinds in _COMMUNICATION:
        long = np.isin(later["kind"], kinds) & (lasted_s >= _MOST * seconds)
        if long.any():
            return _Last(rank.rank, rank.names[later["name"][long][0]], seconds, waits=True)
    sampled = Counter(later["name"][later["kind"] == Kind.SAMPLE].tolist())
    if sampled:
        (name, _), *_ = sampled.most_common(1)
        return _Last(rank.rank, rank.names[name], seconds, waits=False)
    phase = rank.status.phase_name if rank.status.phase else ""
    return _Last(rank.rank, phase, seconds, waits=False)


def _ranks(found: Sequence[_Last]) -> str:
    names = [str(last.rank) for last in found[:_NAMED]]
    left = len(found) - len(names)
    if left:
        return f"ranks {', '.join(names)} and {left:,} more"
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def _said(found: Sequence[_Last]) -> str:
    """Return what ranks that did not wait were doing."""
    known = [last for last in found if last.activity][:_NAMED]
    if not known:
        return f"nothing was recorded of what {_ranks(found)} did"
    return "; ".join(f"rank {last.rank} was in {last.activity}" for last in known)
