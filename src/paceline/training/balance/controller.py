"""Decides the ranks' shares of a batch: a pure state machine that all ranks run alike.

Every few steps the ranks exchange what they measured, a `RankWindow` each; the same windows give
the same decision on every rank, so that none leads. The model of a rank's time has one figure for
all ranks, since they run the same code, and one of its own::

    busy_s(n) = per_sample_s * (fixed + n)      fixed: what a step costs beside its n samples, in
                                                samples; 0 until a change of n has shown it

A change is made when two windows running promise a gain that is worth it and above their noise, or
four a small one. Its effect is measured over the next two windows: what made steps longer is
undone, and taking samples from the same ranks is not tried again.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.runs.balance import BalanceAction
from paceline.training.balance.division import Speed, divide_samples, in_proportion

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of normally distributed values: sigma over the median absolute deviation, and the standard error
# of a median over that of a mean.
_SIGMA_OF_MAD = 1.4826
_MEDIAN_ERROR = 1.2533
_EVERY = 5  # batches from one exchange to the next, while something is going on
_EVERY_QUIET = 10  # and while nothing is; a multiple, so that a window begins where another ended
_ERRORS = 8  # windows over which the noise is averaged
_LEAST_CHANGE = 0.1  # of a rank's samples, to learn from what its time became
_NEARLY_EQUAL = 1.02  # of the shortest time: equal shares, which need no weights, are as good


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRules:
    """When shares change, and how far.

    Attributes:
        least_gain: of a step's time.
        windows: running, that must promise it.
        small_gain: of a step's time, under which more windows must: cores differ by a tenth for a
            second now and then, beside other machines on the same processor.
        small_gain_windows: how many.
        noise_factor: standard errors of the windows that the gain must exceed.
        least_share: of an equal share, that a rank keeps.
        most_share: of an equal share, that a rank gets.
        worse: share of a step's time by which it may be longer after a change.
        much_worse: the same after one window alone.
        slow_ratio: of a rank's time for a sample to the others', from which it is slow.
        recovered_ratio: under which it is not any more.
        slow_windows: running, after which a slow rank's node is reported.
        least_steps: of a window, to count.
    """

    least_gain: float = 0.05
    windows: int = 2
    small_gain: float = 0.1
    small_gain_windows: int = 4
    noise_factor: float = 2.0
    least_share: float = 0.25
    most_share: float = 3.0
    worse: float = 0.02
    much_worse: float = 0.1
    slow_ratio: float = 1.2
    recovered_ratio: float = 1.1
    slow_windows: int = 4
    least_steps: int = 3


class RankWindow(NamedTuple):
    """What a rank measured over its last steps; seconds are per batch.

    Attributes:
        steps: that were measured.
        generation: of the shares with which all of them ran; -1 if they changed within.
        samples: of a batch of this rank.
        busy_s: median; see `BalanceAction`.
        spread_s: median absolute deviation of it.
        step_s: median.
        data_s: mean time that the loop waited for a batch.
        running_s: mean time of the main thread on a core.
        not_running_s: mean time that it was ready and had no core.
        most: samples that the rank's memory has room for.
    """

    steps: int
    generation: int
    samples: int
    busy_s: float
    spread_s: float
    step_s: float
    data_s: float = 0.0
    running_s: float = 0.0
    not_running_s: float = 0.0
    most: int = 1 << 30

    @property
    def error_s(self) -> float:
        """Standard error of `busy_s`."""
        return _MEDIAN_ERROR * _SIGMA_OF_MAD * self.spread_s / math.sqrt(self.steps)


@dataclass(slots=True)
class LaggingRank:
    """A rank that is slower than the others now.

    Attributes:
        since_step: the step at which it was first so.
        windows: how many running.
        ratio: of its time for a sample to the others', in the last of them.
        cause: of its extra time.
    """

    since_step: int
    windows: int
    ratio: float
    cause: str


@dataclass(frozen=True, slots=True)
class _Change:
    """A change whose effect is being measured."""

    before: tuple[int, ...]
    busy_s: tuple[float, ...]
    step_s: float
    predicted_step_s: float
    measured: list[float]


class Controller:
    """The shares of a batch, and what changes them.

    Attributes:
        samples: of each rank in a batch, as last decided.
        generation: of these shares; rises with each change.
        slow: the ranks that are slower than the others, by rank.
    """

    def __init__(
        self,
        batch: int,
        ranks: int,
        rules: BalanceRules | None = None,
        *,
        weights: Sequence[float] = (),
    ) -> None:
        """Make a controller of equal shares.

        Args:
            batch: samples of a rank's batch, as the script asks for it.
            ranks: number of ranks.
            rules: when shares change.
            weights: of the ranks' shares with which to begin; empty: equal.
        """
        self.rules = rules or BalanceRules()
        self.samples = (batch,) * ranks
        self.generation = 0
        self.slow: dict[int, LaggingRank] = {}
        self._batch = batch
        self._wanted = tuple(weights)
        self._fixed = 0.0
        self._errors_s: deque[float] = deque(maxlen=_ERRORS)
        self._running: list[Sequence[RankWindow]] = []  # windows that promise the same change
        self._trial: _Change | None = None
        self._barred: set[frozenset[int]] = set()  # ranks from which samples are not taken again
        self._found: set[int] = set()  # ranks whose finding was reported, until they recover

    def decide(self, windows: Sequence[RankWindow], step: int) -> list[BalanceAction]:
        """Take the windows of all ranks; return what follows from them, in order.

        After an action with `new_samples`, `samples` and `generation` are the new ones: the caller
        puts them in force at a batch that no rank has drawn yet.

        Args:
            windows: of each rank, over the same steps.
            step: batches that each rank has got.
        """
        if any(
            window.generation != self.generation or window.steps < self.rules.least_steps
            for window in windows
        ):
            return []
        self._errors_s.append(statistics.fmean(window.error_s for window in windows))
        if self._wanted:
            return self._begin_as_asked(windows, step)
        actions = self._note_slow(windows, step)
        if self._trial is not None:
            return actions + self._judge(self._trial, windows, step)
        return actions + self._propose(windows, step)

    def _begin_as_asked(self, windows: Sequence[RankWindow], step: int) -> list[BalanceAction]:
        weights, self._wanted = self._wanted, ()
        before = self.samples
        self._change(in_proportion(sum(before), weights, self._least))
        return [self._action("restored", windows, step, before=before, new_samples=self.samples)]

    @property
    def every(self) -> int:
        """Batches from one exchange of the ranks' windows to the next; the same on all ranks."""
        is_quiet = not (self.slow or self._running or self._trial or self._wanted)
        return _EVERY_QUIET if is_quiet else _EVERY

    # --- who is slow ------------------------------------------------------------------------------

    def _note_slow(self, windows: Sequence[RankWindow], step: int) -> list[BalanceAction]:
        """Keep the list of slow ranks; return what is found."""
        actions = []
        for rank, ratio in enumerate(self._ratios(windows)):
            known = self.slow.get(rank)
            is_seen = ratio >= self.rules.slow_ratio and self._is_above_noise(rank, windows)
            is_found = rank in self._found
            if ratio < self.rules.recovered_ratio or (known and not is_found and not is_seen):
                self.slow.pop(rank, None)
                self._found.discard(rank)
            elif known is not None:
                known.windows += 1
                known.ratio, known.cause = ratio, cause_of(rank, windows, self._fixed)
                if known.windows >= self.rules.windows and not is_found:
                    self._found.add(rank)
                    actions.append(self._action("found", windows, step, rank=rank))
            elif is_seen:
                cause = cause_of(rank, windows, self._fixed)
                self.slow[rank] = LaggingRank(step, 1, ratio, cause)
        return actions

    @property
    def persistent(self) -> dict[int, LaggingRank]:
        """The ranks that have been slow for so long that their nodes are reported."""
        return {
            rank: slow
            for rank, slow in self.slow.items()
            if slow.windows >= self.rules.slow_windows
        }

    def _ratios(self, windows: Sequence[RankWindow]) -> list[float]:
        """Return each rank's time for a sample over the median of the others'."""
        times = [window.busy_s / (self._fixed + window.samples) for window in windows]
        if len(times) < 2:
            return [1.0] * len(times)
        return [
            own / max(1e-12, others)
            for own, others in zip(times, _medians_of_others(times), strict=True)
        ]

    def _is_above_noise(self, rank: int, windows: Sequence[RankWindow]) -> bool:
        """Return whether a rank's extra time exceeds what noise explains."""
        others = [window.busy_s for other, window in enumerate(windows) if other != rank]
        extra_s = windows[rank].busy_s - statistics.median(others)
        weighs_less = windows[rank].samples < self._batch
        return weighs_less or extra_s > self.rules.noise_factor * self._noise_s(windows)

    def _noise_s(self, windows: Sequence[RankWindow]) -> float:
        """Return the standard error of the ranks' times.

        A few steps tell little about it: their median deviation is small by chance now and then, so
        that the mean over the last windows counts where it is larger.
        """
        latest = statistics.fmean(self._errors_s) if self._errors_s else 0.0
        return max(latest, *(window.error_s for window in windows))

    # --- changes ----------------------------------------------------------------------------------

    def _propose(self, windows: Sequence[RankWindow], step: int) -> list[BalanceAction]:
        """Change the shares if the last windows together promise that steps become shorter."""
        slowest = _slowest(windows)
        if self._running and _slowest(self._running[-1]) != slowest:
            self._running.clear()
        step_s = _step_s(windows)
        least_s = max(
            self.rules.least_gain * step_s, self.rules.noise_factor * self._noise_s(windows)
        )
        # No shares are ready before the rank that is ready first with these: where ranks are even,
        # nothing is to be divided.
        busy_s = [window.busy_s for window in windows]
        is_worth_it = max(busy_s) - min(busy_s) > least_s
        samples, gain_s = self._best(windows) if is_worth_it else (self.samples, 0.0)
        if samples == self.samples or gain_s <= least_s:
            self._running.clear()
            return []
        self._running.append(windows)
        is_small = gain_s < self.rules.small_gain * step_s
        if len(self._running) < (self.rules.small_gain_windows if is_small else self.rules.windows):
            return []
        joined = [_joined(own) for own in zip(*self._running, strict=True)]
        self._running.clear()
        samples, gain_s = self._best(joined)
        givers = _givers(self.samples, samples)
        if samples == self.samples or givers in self._barred:
            return []
        before, step_s = self.samples, _step_s(joined)
        predicted_s = step_s - gain_s
        self._change(samples)
        self._trial = _Change(
            before, tuple(window.busy_s for window in joined), step_s, predicted_s, []
        )
        return [
            self._action(
                "rebalanced",
                joined,
                step,
                rank=slowest,
                before=before,
                new_samples=samples,
                predicted_step_s=predicted_s,
            )
        ]

    def _judge(
        self, trial: _Change, windows: Sequence[RankWindow], step: int
    ) -> list[BalanceAction]:
        """Measure what a change brought; undo it if steps became longer."""
        trial.measured.append(_step_s(windows))
        measured_s = statistics.fmean(trial.measured)
        is_done = len(trial.measured) >= self.rules.windows
        share = self.rules.worse if is_done else self.rules.much_worse
        tolerated_s = max(share * trial.step_s, self.rules.noise_factor * self._noise_s(windows))
        is_worse = measured_s > trial.step_s + tolerated_s
        if not (is_worse or is_done):
            return []
        self._trial = None
        self._learn(trial, windows)
        shown = self._action(
            "measured",
            windows,
            step,
            rank=_slowest(windows),
            before=trial.before,
            predicted_step_s=trial.predicted_step_s,
        )
        shown = dataclasses.replace(shown, step_s=trial.step_s, measured_step_s=measured_s)
        if not is_worse:
            return [shown]
        self._barred.add(_givers(trial.before, self.samples))
        self._change(trial.before)
        return [dataclasses.replace(shown, kind="undone", new_samples=trial.before)]

    def _learn(self, trial: _Change, windows: Sequence[RankWindow]) -> None:
        """Learn what a step costs beside its samples, from the same ranks with other shares."""
        seen = []
        for count, before_s, window in zip(trial.before, trial.busy_s, windows, strict=True):
            change = window.samples - count
            if abs(change) >= _LEAST_CHANGE * count and (window.busy_s - before_s) * change > 0:
                fixed = (before_s * window.samples - window.busy_s * count) / (
                    window.busy_s - before_s
                )
                seen.append(min(2.0 * self._batch, max(0.0, fixed)))
        if seen:
            self._fixed = (self._fixed + statistics.median(seen)) / 2

    def _best(self, windows: Sequence[RankWindow]) -> tuple[tuple[int, ...], float]:
        """Return the best shares, and by how much earlier the last rank would be ready."""
        speeds = []
        for window in windows:
            per_sample_s = max(1e-12, window.busy_s / (self._fixed + window.samples))
            speeds.append(Speed(self._fixed * per_sample_s, per_sample_s))
        limits = [
            max(window.samples, min(window.most, int(self.rules.most_share * self._batch)))
            for window in windows
        ]
        samples = divide_samples(sum(self.samples), speeds, self._least, limits)
        equal = (self._batch,) * len(samples)
        if _ready_s(speeds, equal) <= _NEARLY_EQUAL * _ready_s(speeds, samples):
            samples = equal
        return samples, max(window.busy_s for window in windows) - _ready_s(speeds, samples)

    @property
    def _least(self) -> int:
        # Batch normalisation needs two samples, which a rank of a smaller share would not have.
        return max(min(2, self._batch), math.ceil(self.rules.least_share * self._batch))

    def _change(self, samples: tuple[int, ...]) -> None:
        self.samples = samples
        self.generation += 1
        self._running.clear()

    def _action(
        self,
        kind: str,
        windows: Sequence[RankWindow],
        step: int,
        *,
        rank: int | None = None,
        before: tuple[int, ...] = (),
        new_samples: tuple[int, ...] = (),
        predicted_step_s: float = 0.0,
    ) -> BalanceAction:
        rank = _slowest(windows) if rank is None else rank
        return BalanceAction(
            kind=kind,  # type: ignore[arg-type]  # checked by the callers, all in this class
            step=step,
            rank=rank,
            ratio=self._ratios(windows)[rank],
            cause=cause_of(rank, windows, self._fixed),
            busy_s=tuple(window.busy_s for window in windows),
            samples=before or self.samples,
            new_samples=new_samples,
            step_s=_step_s(windows),
            predicted_step_s=predicted_step_s,
        )


def cause_of(rank: int, windows: Sequence[RankWindow], fixed: float = 0.0) -> str:
    """Return where most of a rank's extra time goes; empty if it has none.

    Time without a core counts first: whatever the rank does takes longer then. Then waiting for
    data, then computing; what is left, the rank was blocked or stopped.

    Args:
        rank: the rank.
        windows: of all ranks.
        fixed: what a step costs beside its samples, in samples.
    """

    def extra(name: str) -> float:
        values = [getattr(window, name) / (fixed + window.samples) for window in windows]
        return float(values[rank] - statistics.median(values[:rank] + values[rank + 1 :]))

    if len(windows) < 2 or (total := extra("busy_s")) <= 0:
        return ""
    seconds = {
        "not_running": extra("not_running_s"),
        "data": extra("data_s"),
        "compute": extra("running_s"),
    }
    for cause, extra_s in seconds.items():
        if extra_s >= total / 2:
            return cause
    seconds["blocked"] = total - math.fsum(max(0.0, value) for value in seconds.values())
    return max(seconds, key=lambda cause: seconds[cause])


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of the others, sorted once: there may be many ranks."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ordered = [values[i] for i in order]
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # of the others, in order
    medians = [0.0] * len(values)
    for place, i in enumerate(order):
        middle = [ordered[at + (at >= place)] for at in (low, high)]
        medians[i] = sum(middle) / 2
    return medians


def _joined(windows: Sequence[RankWindow]) -> RankWindow:
    """Return the windows of a rank, which ran with the same shares, as one."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(window, name) for window in windows)

    return windows[-1]._replace(
        steps=sum(window.steps for window in windows),
        busy_s=mean("busy_s"),
        spread_s=mean("spread_s"),
        step_s=mean("step_s"),
        data_s=mean("data_s"),
        running_s=mean("running_s"),
        not_running_s=mean("not_running_s"),
        most=min(window.most for window in windows),
    )


def _slowest(windows: Sequence[RankWindow]) -> int:
    return max(range(len(windows)), key=lambda rank: (windows[rank].busy_s, -rank))


def _step_s(windows: Sequence[RankWindow]) -> float:
    """Return a step's time: ranks end it together, so that all measured the same."""
    return statistics.median(window.step_s for window in windows)


def _ready_s(speeds: Sequence[Speed], samples: Sequence[int]) -> float:
    return max(speed.busy_s(count) for speed, count in zip(speeds, samples, strict=True))


def _givers(before: Sequence[int], after: Sequence[int]) -> frozenset[int]:
    """Return the ranks that have fewer samples after than before."""
    pairs = zip(before, after, strict=True)
    return frozenset(rank for rank, (old, new) in enumerate(pairs) if new < old)
