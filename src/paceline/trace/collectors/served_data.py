"""Records what the data servers of a node did for its programs, as counters of each step.

Programs and servers count in memory that they share (range_requests.hpp). The first rank of each
node notes at the end of its steps by how much the counts have grown; the counters of a step say
what the whole node read in it, and what its server copied and sent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.native import RangeRequests, ServedCount, monotonic_ns, served_counts
from paceline.trace.format.events import DATA_COUNTERS, DATA_QUEUE, MAIN, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.native import Recorder

_LEAST_NS = 20_000_000  # between two readings: short steps share one


class ServedDataRecorder:
    """Used by the main thread alone.

    Args:
        recorder: of the rank.
        memories: paths of the memory of each pack's requests, on this node.

    Raises:
        OSError: one of them cannot be opened.
    """

    def __init__(self, recorder: Recorder, memories: Iterable[str]) -> None:
        self._recorder = recorder
        self._memories = [RangeRequests.open(os.fsencode(path)) for path in memories]
        names = {count: recorder.intern(name) for name, count in DATA_COUNTERS.items()}
        self._names = {ServedCount[count.upper()]: name for count, name in names.items()}
        self._queue_name = recorder.intern(DATA_QUEUE)
        self._last = self._sums()
        self._noted_ns = 0

    def note(self) -> None:
        """Record what was counted since the last call, as part of the step that ends."""
        now_ns = monotonic_ns()
        if now_ns - self._noted_ns < _LEAST_NS:
            return
        sums, self._noted_ns = self._sums(), now_ns
        for count, name in self._names.items():
            if sums[count] != self._last[count]:
                self._record(name, now_ns, sums[count] - self._last[count])
        if queue := sum(memory.queue_length() for memory in self._memories):
            self._record(self._queue_name, now_ns, queue)
        self._last = sums

    def _record(self, name: int, now_ns: int, value: int) -> None:
        self._recorder.record(int(Kind.COUNTER), MAIN, name, now_ns, now_ns, value)

    def _sums(self) -> dict[ServedCount, int]:
        counted = [served_counts(memory) for memory in self._memories]
        return {count: sum(counts[count] for counts in counted) for count in ServedCount}
