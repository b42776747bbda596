"""Decides which steps are looked at more closely, so that this costs no more than it may.

What costs too much for every step is done in few of them. A sampled step says what it took; the
next one comes when enough time has passed for that to be at most `share` of it, and enough steps
for at most `most_ns` each. So the bound holds whatever a hook costs on this machine, in this model.

A sampled step of one rank delays those that wait for it. Steps are multiples of a power of two, so
that the ranks of a run sample the same ones, or one rank a part of those of another.
"""

from __future__ import annotations

FIRST_STEP = 4  # the steps before it warm up; a short run has one sampled step, too
LEAST_EVERY = 16


class SampledSteps:
    """Which steps are sampled; used by the main thread alone.

    Args:
        share: of the run's time that sampling may take.
        most_ns: that it may take for each step of the run, on average.

    Attributes:
        every: sampled steps are multiples of it; a power of two.
    """

    def __init__(self, share: float, most_ns: int) -> None:
        self._share = share
        self._most_ns = most_ns
        self.every = FIRST_STEP
        self._due_step = FIRST_STEP
        self._due_ns = 0

    def next_step(self, after: int) -> int:
        """Return the first step after step `after` that may be sampled."""
        return -(-max(self._due_step, after + 1) // self.every) * self.every

    def is_sampled(self, step: int, now_ns: int) -> bool:
        """Return whether the step `step`, which begins now, is sampled."""
        if step < self._due_step or step % self.every:
            return False
        if now_ns < self._due_ns:
            self.every *= 2  # steps are shorter than they seemed, on all ranks alike
            return False
        return True

    def note_cost(self, step: int, begin_ns: int, cost_ns: int) -> None:
        """Note what sampling took in a step.

        Args:
            step: the sampled one.
            begin_ns: when it began.
            cost_ns: that it took longer for being sampled.
        """
        between = max(LEAST_EVERY, cost_ns / self._most_ns)
        while self.every < between:
            self.every *= 2
        if self.every > LEAST_EVERY and self.every >= 2 * between:
            self.every //= 2  # a first step that had more to do does not count for ever
        # The next multiple of `every` may come sooner than `every` steps later.
        self._due_step = step + int(between)
        self._due_ns = begin_ns + int(cost_ns / self._share)
