"""The rank's side of `--tune`: switches the setting between blocks of steps, and measures them.

A step ends with a step of the optimizer that steps first. Its number alone says which value the
next one has, so that all ranks switch at the same step. After the last pair before a look the ranks
exchange the medians of their blocks: the slowest rank's is what a step took, all ranks have the
same numbers, and decide the same.

The exchange has a process group of its own, so that the script's collectives keep their order and
their sequence numbers. It has a deadline: a rank that has no more batches does not come, and then
the first value stays. Nothing that goes wrong here ends the script.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.core.clock import Clock, SystemClock
from paceline.core.files import commit_text
from paceline.launch.tuning.paired_test import TuneRules, judge
from paceline.launch.tuning.schedule import block_of
from paceline.launch.tuning.settings import TuneQuestion, parse_tune, tuned_settings
from paceline.runs.tuning import TUNE_NAME, TunedPair, TuneResult

if TYPE_CHECKING:
    from paceline.launch.tuning.paired_test import PairedDifference

EXCHANGE_S = 60.0  # for all ranks to come to the end of a block

_sessions: list[TuneSession] = []  # a process has one


def start(question: str, run: Path, rank: int, seed: int) -> None:
    """Begin to tune in this process, before its script.

    Args:
        question: as ``--tune`` has it.
        run: the run's folder, to which rank 0 writes the result.
        rank: of this process.
        seed: of the order of blocks, the same on all ranks.
    """
    _sessions.append(TuneSession(parse_tune(question), run, rank, seed))


@dataclass(eq=False)
class TuneSession:
    """What a rank measures; used by the thread that trains.

    Attributes:
        question: the setting and its values.
        run: the run's folder.
        rank: of this process.
        seed: of the order of blocks.
        rules: of the test.
        clock: measures steps.
        exchange: returns the slowest rank's values; raises what ends the session.
    """

    question: TuneQuestion
    run: Path
    rank: int
    seed: int = 0
    rules: TuneRules = field(default_factory=TuneRules)
    clock: Clock = field(default_factory=SystemClock)
    exchange: Callable[[list[float]], list[float]] | None = None

    def __post_init__(self) -> None:
        self._setting = tuned_settings()[self.question.setting]
        self._values = (self.question.first, self.question.second)
        self._expected = self._setting.current()  # the script has not run yet
        self._step = 0
        self._begin_s = 0.0
        self._block_s: list[float] = []
        self._medians: list[tuple[int, float]] = []  # value and median of each block
        self._pairs: list[TunedPair] = []
        self._exchanged = 0
        self._optimizer: weakref.ref[Any] | None = None
        self._exchange = self.exchange or Slowest()
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        try:
            self.end_step()
        except Exception as problem:  # noqa: BLE001  # tuning must not end the script
            self._finish("stopped", None, reason=f"{type(problem).__name__}: {problem}")

    def end_step(self) -> None:
        """Note the end of a step; switch the setting if the next one begins a block."""
        now_s = self.clock.now_s()
        block = block_of(self._step, self.rules, self.seed)
        if block is not None and block.step >= self.rules.settle_steps:
            self._block_s.append(now_s - self._begin_s)
        if block is not None and block.step == self.rules.block_steps - 1:
            self._medians.append((block.value, statistics.median(self._block_s)))
            self._block_s = []
            if block.is_last and block.pair + 1 in self.rules.looks and self._look():
                return
        self._step += 1
        following = block_of(self._step, self.rules, self.seed)
        if following is not None and following.step == 0:
            self._switch(self._values[following.value])
        self._begin_s = self.clock.now_s()

    def _switch(self, value: int) -> None:
        found = self._setting.current()
        if self._expected is not None and found != self._expected:
            self._leave_alone(found)
            return
        self._setting.apply(value)
        self._expected = self._setting.current()

    def _leave_alone(self, found: int | None) -> None:
        """End the session: the script sets the value by itself, and keeps what it has."""
        self._hook.remove()
        self._write(
            "stopped",
            self.question.first if found is None else found,
            None,
            reason=f"the script sets {self.question.setting} itself, to {found}",
        )

    def _look(self) -> bool:
        """Exchange what was measured since the last look; return whether that ends the session."""
        fresh = self._medians[2 * self._exchanged :]
        slowest_s = self._exchange([seconds for _, seconds in fresh])
        for i in range(0, len(fresh), 2):
            by_value = {fresh[i][0]: slowest_s[i], fresh[i + 1][0]: slowest_s[i + 1]}
            pair = len(self._pairs)
            begin = self.rules.warm_up_steps + 2 * pair * self.rules.block_steps
            self._pairs.append(TunedPair(begin, by_value[0], by_value[1]))
        self._exchanged = len(self._pairs)
        verdict, found = judge(
            [pair.first_s for pair in self._pairs],
            [pair.second_s for pair in self._pairs],
            self.rules,
        )
        if verdict == "undecided":
            self._write(verdict, self.question.first, found)
            return False
        self._finish(verdict, found)
        return True

    def _finish(self, verdict: str, found: PairedDifference | None, reason: str = "") -> None:
        self._hook.remove()
        kept = self.question.second if verdict == "second" else self.question.first
        with contextlib.suppress(OSError, RuntimeError):  # what stopped it may stop this, too
            self._setting.apply(kept)
        self._write(verdict, kept, found, reason=reason)

    def _write(
        self, verdict: str, kept: int, found: PairedDifference | None, reason: str = ""
    ) -> None:
        if self.rank != 0:
            return
        result = TuneResult(
            setting=self.question.setting,
            first=self.question.first,
            second=self.question.second,
            verdict=verdict,
            kept=kept,
            step=self._step + 1,
            change=found.change if found else None,
            low=found.low if found else None,
            high=found.high if found else None,
            p_value=found.p_value if found else None,
            pairs=tuple(self._pairs),
            reason=reason,
        )
        with contextlib.suppress(OSError):  # a full disk does not end the script either
            commit_text(self.run / TUNE_NAME, result.to_text())


class Slowest:
    """Exchanges seconds between the ranks; each gets the largest of each."""

    def __init__(self) -> None:
        self._group: Any = None

    def __call__(self, seconds: list[float]) -> list[float]:
        """Return the largest of all ranks' values, each by its place.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return seconds
        timeout = datetime.timedelta(seconds=EXCHANGE_S)
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return [float(value) for value in values]
