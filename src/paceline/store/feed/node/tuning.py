"""How far and how wide to read: found by measuring, while the reads go on.

What moves most bytes a second depends on what storage is, and on who else uses it: disks want
several reads at a time, a file system of few spindles wants one, and this changes in the course of
a job. So nothing is assumed: a value is doubled or halved for a while, and kept if more bytes move.
All of this is arithmetic on what was measured; time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_GAIN = 1.05  # a change must move so much more to be kept
_LONGEST_PAUSE = 16  # periods between two trials, when none of the last ones was any better
_WINDOWS = 4  # of a period of `ReadTuner`


@dataclass(slots=True)
class HillClimb:
    """Finds which of `most`, `most` / 2, ... 1 moves most bytes a second.

    A trial of another value lasts one period: half of the best so far, twice as much, and the ends
    of the range, because a neighbour alone may be no better where the end is (two readers that
    alternate on one disk are as slow as eight). The longer no trial is any better, the rarer they
    become: where one turn is best, two may take many times as long.

    Attributes:
        most: the largest value.
        value: what to use in this period; `most` at the start.
        best: the value that moved most so far.
    """

    most: int
    value: int = field(init=False)
    best: int = field(init=False)
    _best_rate: float = field(default=0.0, init=False)
    _trials: list[int] = field(default_factory=list, init=False)  # what is to be tried next
    _pause: int = field(default=1, init=False)  # periods from one trial to the next
    _rest: int = field(default=1, init=False)  # of these, how many are left

    def __post_init__(self) -> None:
        self.value = self.best = self.most

    def start_at(self, value: int) -> None:
        """Take a value for the best so far, if it is in the range."""
        self.value = self.best = min(self.most, max(1, value))

    def decide(self, rate: float) -> None:
        """Note how many bytes a second moved in this period; choose `value` for the next one."""
        if self.value == self.best:
            self._best_rate = rate  # measured again: storage changes in the course of a job
            self._rest -= 1
            if self._rest <= 0:
                self._trials = self._trials or self._others()
                self.value = self._trials.pop(0)
            return
        if rate > self._best_rate * _GAIN:
            self.best, self._best_rate, self._pause = self.value, rate, 1
            self._trials.clear()  # its own neighbours first
        elif not self._trials:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._rest, self.value = self._pause, self.best

    def _others(self) -> list[int]:
        """Return what to try beside the best value, in this order."""
        halved, doubled = self.best // 2, self.best * 2
        wanted = [n for n in (halved, doubled, 1, self.most) if 1 <= n <= self.most]
        return [n for n in dict.fromkeys(wanted) if n != self.best] or [self.best]


@dataclass(slots=True)
class ReadTuner:
    """Finds how many reads at a time, and windows of which size, bring most bytes a second.

    One of the two is changed at a time. A window is a power of two's part of the largest one: a
    larger one has more neighbours to read together, a smaller one leaves the memory more room.

    Attributes:
        depth: reads that are under way at a time.
        windows: size of a window, as a part of the largest one: `windows.value / windows.most`.
    """

    depth: HillClimb
    windows: HillClimb
    _bytes: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _count: int = field(default=0, init=False)
    _tunes_depth: bool = field(default=True, init=False)

    def record(self, read_bytes: int, seconds: float) -> None:
        """Note how long the reads of a window of the present size took."""
        self._bytes += read_bytes
        self._seconds += seconds
        self._count += 1
        if self._count < _WINDOWS or self._seconds <= 0:
            return
        tuned = self.depth if self._tunes_depth else self.windows
        was_trial = tuned.value != tuned.best
        tuned.decide(self._bytes / self._seconds)
        if was_trial or tuned.most == 1:
            self._tunes_depth = not self._tunes_depth
        self._bytes = self._count = 0
        self._seconds = 0.0
