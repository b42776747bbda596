"""Draws a replayed pipeline as text: a row for each rank, time from left to right.

::

    rank 0  F0 F1 ......B0--- F2 B1--- ...B2---   25 % idle
    rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......  25 % idle
    1f1b: 12.0 s, ranks idle for 25 % of it

F is a forward, B a backward, I and W its parts for inputs and weights (`backward_input`,
`backward_weight`); the number is the microbatch, after that of the stage where a rank has several.
Dots are idle time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.report.units import format_seconds, format_share, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.schedules.pipeline import (
        ActionKind,
        PipelineAction,
        PipelineReplay,
        PipelineSchedule,
    )

MAX_RANKS = 32
LETTERS: Mapping[ActionKind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
}
_IDLE, _GOES_ON = ".", "-"


def timeline(schedule: PipelineSchedule, replayed: PipelineReplay, *, width: int = 100) -> str:
    """Return the replayed schedule as lines of text.

    Args:
        schedule: that was replayed.
        replayed: when its actions ran.
        width: the most characters for the time of the batch. Fewer are taken if every action's
            name is readable with fewer.

    Returns:
        A line for each of the first `MAX_RANKS` ranks, and one that says what was drawn.
    """
    makespan_s = replayed.makespan_s
    labels = [[_label(schedule, action) for action in order] for order in schedule.actions]
    per_s = _columns_per_s(replayed, labels, width)
    columns = round(makespan_s * per_s)
    bubble_s = replayed.bubble_s
    lines = []
    for rank in range(min(schedule.ranks, MAX_RANKS)):
        row = [_IDLE] * columns
        times = zip(replayed.start_s[rank], replayed.end_s[rank], labels[rank], strict=True)
        for start_s, end_s, label in times:
            begin, end = round(start_s * per_s), round(end_s * per_s)
            row[begin:end] = _bar(label, end - begin)
        idle = format_share(bubble_s[rank] / makespan_s if makespan_s else 0.0)
        lines.append(f"{f'rank {rank}':<8}{''.join(row)}  {idle} idle")
    hidden = schedule.ranks - len(lines)
    if hidden:
        lines.append(f"... and {plural(hidden, 'more rank')}")
    lines.append(
        f"{schedule.name}: {format_seconds(makespan_s)}, ranks idle for "
        f"{format_share(replayed.bubble_share)} of it"
    )
    return "\n".join(lines) + "\n"


def _label(schedule: PipelineSchedule, action: PipelineAction) -> str:
    letter = LETTERS[action.kind]
    if len(set(schedule.rank_of)) == schedule.stages:
        return f"{letter}{action.microbatch}"
    return f"{letter}{action.stage}.{action.microbatch}"


def _columns_per_s(replayed: PipelineReplay, labels: Sequence[Sequence[str]], width: int) -> float:
    """Return the scale with which the shortest action shows its name, or one that fits `width`."""
    makespan_s = replayed.makespan_s
    named = [
        (end_s - start_s, len(label))
        for starts, ends, names in zip(replayed.start_s, replayed.end_s, labels, strict=True)
        for start_s, end_s, label in zip(starts, ends, names, strict=True)
        if end_s > start_s
    ]
    if not named:
        return 0.0
    per_s = min(max((length + 1) / seconds for seconds, length in named), width / makespan_s)
    # Equal actions are drawn equally long if the shortest one takes a whole number of columns.
    shortest_s, _ = min(named)
    columns = math.floor(per_s * shortest_s + 1e-6)
    return columns / shortest_s if columns else per_s


def _bar(label: str, columns: int) -> str:
    """Return an action as `columns` characters; the last is blank where the name leaves room."""
    if columns <= len(label):
        return f"{label[:columns].rstrip(_IDLE):{_GOES_ON}<{columns}}"
    return f"{label:{_GOES_ON}<{columns - 1}} "
