"""The event schema: one rank's life as flat records, the same for every framework.

An event is an interval on a lane. The main lane holds what the training loop does, properly
nested; the communication lane holds collectives from issue to completion, which overlap with it.
Analyses see arrays of `EVENT_DTYPE`, never objects. The bytes on disk are in
docs/reference/trace-format.md.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

FORMAT_VERSION = 1


class Kind(IntEnum):
    """What an event is; the numbers are those of the file."""

    STEP = 0
    INPUT = 1
    COPY = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    COLLECTIVE = 6
    WAIT = 7
    CHECKPOINT = 8
    COUNTER = 9


class Lane(IntEnum):
    """Where an event happens."""

    MAIN = 0
    COMMUNICATION = 1


# `amount` is bytes moved; of a counter, its value. `name` and `group` are indices into the rank's
# names; `sequence` counts a group's collectives from 1; `peer` is a root or the other side, or -1.
EVENT_DTYPE = np.dtype(
    [
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("amount", "<u8"),
        ("step", "<u4"),
        ("name", "<u4"),
        ("group", "<u4"),
        ("sequence", "<u4"),
        ("peer", "<i4"),
        ("kind", "u1"),
        ("lane", "u1"),
        ("reserved", "<u2"),
    ]
)

# Collectives after which every rank of the group knows that all others have come. In all others
# data flows one way, in some of them from or to a root.
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
TO_ROOT = frozenset({"reduce", "gather"})
ROOTED = TO_ROOT | {"broadcast", "scatter"}

DRAIN = "drain"  # the wait at the end of a backward pass for collectives issued within it
# Counters of a step, summed over the process's threads: time on a core, and time runnable without.
RUNNING, NOT_RUNNING = "running_ns", "not_running_ns"
