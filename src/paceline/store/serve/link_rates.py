"""Which nodes send slowly, so that replicas are read instead.

A batch takes as long as the slowest of its nodes. Which node of several holders is read is fixed
otherwise, so that each keeps its own part of the data in memory; a node is passed over only where
another holder sent several times as fast lately. Now and then it is tried again.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.clock import Clock

_SLOWER = 4.0  # than another holder of the same shard; less is noise, or its turn to be busy
_TRY_AGAIN_S = 5.0
_TELL_AGAIN_S = 60.0
_WEIGHT = 0.5  # of the newest rate in the mean: two answers suffice to notice either way
_LOG = logging.getLogger(__name__)


class LinkRates:
    """Bytes per second of what nodes sent lately. May be used from many threads at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # of what follows
        self._rates: dict[str, float] = {}  # bytes per second
        self._tried_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}

    def note(self, node: str, size_bytes: int, seconds: float) -> None:
        """Take note of an answer."""
        if seconds <= 0 or not size_bytes:
            return
        rate = size_bytes / seconds
        with self._lock:
            before = self._rates.get(node, rate)
            self._rates[node] = before + _WEIGHT * (rate - before)
            self._tried_s[node] = self._clock.now_s()

    def order(self, nodes: Sequence[str]) -> list[str]:
        """Return the holders of a shard, slow ones last, the others in the same order."""
        if len(nodes) < 2:
            return list(nodes)
        with self._lock:
            fastest = max((self._rates.get(node, 0.0) for node in nodes), default=0.0)
            slow = {node for node in nodes if self._is_passed_over(node, fastest)}
        return sorted(nodes, key=slow.__contains__)

    def _is_passed_over(self, node: str, fastest: float) -> bool:
        """Return whether a node is slow and not due to be tried; the caller has the lock."""
        rate = self._rates.get(node, math.inf)
        if rate * _SLOWER >= fastest:
            return False
        now_s = self._clock.now_s()
        if now_s - self._told_s.get(node, -math.inf) >= _TELL_AGAIN_S:
            self._told_s[node] = now_s
            _LOG.warning(
                "%s sends %.3g MB/s, a replica %.3g MB/s: replicas are read where there are any",
                node,
                rate / 1e6,
                fastest / 1e6,
            )
        if now_s - self._tried_s[node] < _TRY_AGAIN_S:
            return True
        self._tried_s[node] = now_s  # this read tries it, others pass it over meanwhile
        return False
