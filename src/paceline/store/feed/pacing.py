"""Decides when a loader begins its next refill: in the parts of a step that leave cores free.

    a step    | quiet | forward, backward | communication, optimizer |
    refills     none    when stock is low   by token bucket

A refill that starts as a batch is taken preempts the thread that launches the step. So the first
part of a step is quiet, and what the step consumed is made again when the loop waits for other
ranks or updates parameters. Tokens come as fast as the loop consumes, with some headroom, so that
refills do not come in a burst either.

Nothing is held back while the loop waits for a batch, while no batch is ready, or before the loop
has shown where its cores are free: a loader that cannot keep up runs at full speed.

Pure: the time comes in as an argument. Whoever owns a `Pacer` calls it from one thread at a time.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

# Chosen by bench/imbalance_pacing.py; see bench/LOG.md.
HEADROOM = 1.5  # tokens that come during a step, in batches
BURST_BATCHES = 2  # that may begin one right after the other
QUIET_SHARE = 0.1  # of a step, from its beginning
_STEPS = 9  # whose median is the duration of a step: one slow step changes nothing
_SMOOTHING = 0.2  # weight of the latest batch in the mean of bytes
NEXT_EVENT_S = float("inf")  # to wait: until something is delivered


class TokenBucket:
    """Tokens for bytes, which come at a steady rate up to a capacity; it starts full.

    Attributes:
        rate_bytes_per_s: at which tokens come.
        capacity_bytes: the most tokens that wait.

    Source: J. Turner, New directions in communications, 1986 (the leaky bucket as a meter).
    """

    def __init__(self, rate_bytes_per_s: float, capacity_bytes: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.capacity_bytes = capacity_bytes
        self._tokens = capacity_bytes
        self._at_s: float | None = None

    def wait_s(self, size_bytes: float, now_s: float) -> float:
        """Return the seconds until `take` has enough tokens; a larger size waits for a full one."""
        self._fill(now_s)
        missing = min(size_bytes, self.capacity_bytes) - self._tokens
        if missing <= 0:
            return 0.0
        return missing / self.rate_bytes_per_s if self.rate_bytes_per_s > 0 else NEXT_EVENT_S

    def take(self, size_bytes: float, now_s: float) -> None:
        """Take tokens, and owe up to one capacity of those that are not there."""
        self._fill(now_s)
        self._tokens = max(self._tokens - size_bytes, -self.capacity_bytes)

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None and now_s > self._at_s:
            came = (now_s - self._at_s) * self.rate_bytes_per_s
            self._tokens = min(self._tokens + came, self.capacity_bytes)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)


@dataclass(frozen=True, slots=True)
class Stock:
    """What a loader has ahead of the loop.

    Attributes:
        ready: batches, made, that the loop can take without waiting.
        in_flight_bytes: of all batches that are made or in the making.
    """

    ready: int
    in_flight_bytes: float


class Pacer:
    """Says for each refill of a loader whether it may begin, or how long it waits.

    Args:
        ahead: batches that the loader may have ahead; with half of them ready, stock is not low.
        bytes_ahead: the most bytes in flight, unless a single batch is larger.

    Attributes:
        is_on: set it to False, and refills begin as soon as there is room, until it is True again.
    """

    def __init__(self, ahead: int, bytes_ahead: float) -> None:
        self.is_on = True
        self._low = max(1, ahead // 2)
        self._bytes_ahead = bytes_ahead
        self._bucket: TokenBucket | None = None  # until the duration of a step is known
        self._batch_bytes = 0.0  # mean of what began
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._step_s = 0.0  # their median
        self._began_s: float | None = None  # the step that runs
        self._waits = False
        self._cores_free = self._shows_free = False  # in this step; in the last one

    # --- what the loop does ------------------------------------------------------------------

    def loop_waits(self) -> None:
        """Note that the loop waits for a batch."""
        self._waits = True

    def step_begins(self, now_s: float) -> None:
        """Note that the loop took a batch: a step ends, and the next one begins."""
        if self._began_s is not None:
            self._steps_s.append(now_s - self._began_s)
            self._step_s = statistics.median(self._steps_s)
            self._set_rate()
        self._began_s = now_s
        self._shows_free, self._cores_free, self._waits = self._cores_free, False, False

    def cores_are_free(self) -> None:
        """Note that the loop communicates or updates parameters, until the next step begins."""
        self._cores_free = True

    # --- refills -----------------------------------------------------------------------------

    def wait_s(self, size_bytes: float, stock: Stock, now_s: float) -> float:
        """Return 0 if a refill may begin, else the seconds after which to ask again.

        `NEXT_EVENT_S`: when a batch has been delivered. Any event may make it earlier.
        """
        if stock.in_flight_bytes and stock.in_flight_bytes + size_bytes > self._bytes_ahead:
            return NEXT_EVENT_S
        if self._waits or stock.ready < 1 or not self.is_pacing:
            return 0.0
        assert self._began_s is not None
        assert self._bucket is not None
        into_s = now_s - self._began_s
        if not self._cores_free:
            if into_s < QUIET_SHARE * self._step_s:
                return QUIET_SHARE * self._step_s - into_s
            if stock.ready >= self._low and into_s < self._step_s:
                return self._step_s - into_s
        return self._bucket.wait_s(size_bytes, now_s)

    def refill_begins(self, size_bytes: float, now_s: float) -> None:
        """Note that a refill began."""
        weight = _SMOOTHING if self._batch_bytes else 1.0
        self._batch_bytes += weight * (size_bytes - self._batch_bytes)
        self._set_rate()
        if self._bucket is not None and self.is_pacing:
            self._bucket.take(size_bytes, now_s)

    def _set_rate(self) -> None:
        if self._step_s > 0:
            rate, capacity = (
                HEADROOM * self._batch_bytes / self._step_s,
                BURST_BATCHES * self._batch_bytes,
            )
            if self._bucket is None:
                self._bucket = TokenBucket(rate, capacity)
            self._bucket.rate_bytes_per_s, self._bucket.capacity_bytes = rate, capacity

    @property
    def is_pacing(self) -> bool:
        """Whether it is on, and the last step, or this one, has shown where cores are free."""
        return self.is_on and self._step_s > 0 and (self._shows_free or self._cores_free)
