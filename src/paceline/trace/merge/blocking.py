"""Adds the waits of calls that block, which their recorder leaves out.

A blocking call of MPI is one event with the flag `BLOCKING`: the main thread waited from its begin
to its end. Recording the wait by itself would double what a message of a microsecond costs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import BLOCKING, MAIN, Kind

if TYPE_CHECKING:
    from paceline.trace.format.files import RankTrace

_COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)


def add_waits(rank: RankTrace) -> RankTrace:
    """Return the trace with a WAIT of the main thread for each event that has the flag."""
    events = rank.events
    blocked = np.isin(events["kind"], _COMMUNICATION) & ((events["flags"] & BLOCKING) != 0)
    if not blocked.any():
        return rank
    waits = events[blocked].copy()
    waits["kind"], waits["location"] = Kind.WAIT, MAIN
    waits["amount"] = waits["flags"] = 0
    return dataclasses.replace(rank, events=np.concatenate([events, waits]))
