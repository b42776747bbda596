"""Brings the times of matched calls onto the run's clock, and derives the times of instances."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import ROOTED
from paceline.trace.merge.matches import NO_TIME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.merge.clocks import ClockCorrection
    from paceline.trace.merge.matches import Matches


def on_run_clock(matches: Matches, clocks: Sequence[ClockCorrection]) -> Matches:
    """Return the matches with all times on the run's clock, and the times of instances.

    Args:
        matches: matched collectives and messages, with times on each rank's own clock.
        clocks: clock correction of each trace.
    """
    calls = _corrected(matches.calls, matches.call_starts, clocks)
    messages = _corrected(matches.messages, matches.message_starts, clocks)
    moved = dataclasses.replace(matches, calls=calls, messages=messages)
    return dataclasses.replace(moved, instances=_timed(moved))


def _timed(matches: Matches) -> np.ndarray:
    """Return the instances with their times, from calls whose times are on the run's clock."""
    instances = matches.instances.copy()
    if not len(instances):
        return instances
    calls, first = matches.calls[matches.by_instance], matches.instance_starts[:-1]
    instances["first_ns"] = np.minimum.reduceat(calls["enter_ns"], first)
    instances["last_ns"] = np.maximum.reduceat(calls["enter_ns"], first)
    instances["complete_ns"] = np.maximum.reduceat(calls["exit_ns"], first)
    instances["largest"] = np.maximum.reduceat(calls["amount"], first)
    instances["mean"] = np.add.reduceat(calls["amount"], first) / instances["ranks"]
    instances["timed"] = np.logical_and.reduceat(calls["timed"], first)
    instances["root_ns"] = NO_TIME
    roots = np.flatnonzero(
        (matches.ranks[calls["trace"]] == calls["peer"]) & matches.are(ROOTED)[calls["operation"]]
    )
    instances["root_ns"][calls["instance"][roots]] = calls["enter_ns"][roots]
    return instances


def _corrected(
    rows: np.ndarray, starts: np.ndarray, clocks: Sequence[ClockCorrection]
) -> np.ndarray:
    if all(clock.is_identity for clock in clocks):
        return rows
    corrected = rows.copy()
    for trace_index, clock in enumerate(clocks):
        own = slice(int(starts[trace_index]), int(starts[trace_index + 1]))
        for field in ("enter_ns", "exit_ns"):
            corrected[field][own] = clock.to_run_ns(rows[field][own])
    return corrected
