"""Runs the cells of a sweep by turns, within a time budget; what has ended is never run again.

The first repeat of all cells comes first, in their order, then the second repeat of all, and so on:
a budget that is used up leaves fewer repeats rather than missing cells. Later repeats are shuffled
(randomised blocks), so that what changes on the machine with time is not taken for an effect of a
setting. A cell is begun only if it is expected to end within the budget.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from paceline.core.config import resolve
from paceline.core.errors import (
    DeadlineExceeded,
    Interrupted,
    MemoryExceeded,
    RankLost,
    ScriptFailed,
    UsageError,
)
from paceline.core.files import append_lines, commit_text
from paceline.core.foreign_cpu import cpu_use
from paceline.core.machine import Machine
from paceline.core.processes import StopRequested, ignore_preemption, signal_name
from paceline.core.randomness import make_generator
from paceline.launch.failures import first_traceback
from paceline.launch.options import RunConfig
from paceline.launch.prepare import claim_folder, prepare
from paceline.launch.program import Program
from paceline.launch.run import execute
from paceline.studies.characterize.axes import (
    BATCH,
    EPOCHS,
    RANKS,
    REPEAT,
    RESULT,
    Cell,
    fill,
)
from paceline.studies.characterize.log import RUNS_NAME, CellRun
from paceline.studies.characterize.measure import measure_run, read_scores
from paceline.studies.characterize.plans import CellPlans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from paceline.core.clock import Clock
    from paceline.studies.characterize.log import SweepLog
    from paceline.trace.format.header import Status

_MANY, _LEAST_S = 5.0, 60.0
_ATTEMPTS = 2  # of a cell that fails: what fails twice is not run again in this call
_FAILURES = (ScriptFailed, RankLost, MemoryExceeded, DeadlineExceeded)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is swept.

    Attributes:
        program: that the ranks run.
        args: its arguments, with the axes' names in braces.
        epochs: value of ``{epochs}``.
        is_global_batch: whether the axis batch counts the samples of all ranks, not of each.
        plans: that the runs follow.
        machine: kept with each run.
    """

    program: Program
    args: tuple[str, ...]
    epochs: int
    is_global_batch: bool
    plans: CellPlans
    machine: Machine

    def units_per_step(self, cell: Cell) -> float:
        """Return the samples of a step on all ranks; without a batch, the batches."""
        batch = cell.settings.get(BATCH)
        if batch is None:
            return 1.0 if self.is_global_batch else float(cell.ranks)
        return float(batch) * (1 if self.is_global_batch else cell.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepLimits:
    """How much a sweep may take.

    Attributes:
        repeats: of each cell.
        budget_s: for all runs of this call; what is left out is said.
        cell_s: for one run; a script that takes longer has failed. Once a run has ended, others
            get `_MANY` times as long as they are expected to take, if that is less.
        seed: of the order of repeats.
    """

    repeats: int = 3
    budget_s: float = 600.0
    cell_s: float = 600.0
    seed: int = 0


class SweepProgress(Protocol):
    """Gets what happens in a sweep."""

    def on_begin(self, cell: Cell, repeat: int, left: int, left_s: float) -> None:
        """Take that a run begins.

        Args:
            cell: that runs.
            repeat: from 1 on.
            left: runs that are still to come, with this one.
            left_s: of the budget.
        """

    def on_status(self, ranks: list[Status]) -> None:
        """Take the ranks' live status, four times a second, on another thread."""

    def on_end(self, run: CellRun) -> None:
        """Take that a run has ended."""


def run_sweep(
    subject: Subject,
    cells: Sequence[Cell],
    limits: SweepLimits,
    log: SweepLog,
    clock: Clock,
    progress: SweepProgress,
) -> int:
    """Run what the log does not have yet, and return how many runs the budget left out.

    Args:
        subject: that is swept.
        cells: to run, the baseline's first.
        limits: of the sweep.
        log: of the sweep's folder, to which each run is added.
        clock: for budget and waits.
        progress: gets what happens.

    Raises:
        ScriptFailed: the first cell does not run to its end, so that nothing can be compared.
        Interrupted: a signal stopped it; what has ended is in the log.
        PacelineError: a run cannot be started at all.
    """
    waiting = _order(cells, limits, log)
    begin_s, failures, left_out = clock.now_s(), Counter[str](), 0
    for number, (cell, repeat) in enumerate(waiting):
        if failures[cell.key] >= _ATTEMPTS:
            continue
        left_s = limits.budget_s - (clock.now_s() - begin_s)
        expected_s = _expected_s(cell, log)
        if number and expected_s > left_s:
            left_out += 1
            continue
        progress.on_begin(cell, repeat, len(waiting) - number, left_s)
        longest_s = max(_LEAST_S, _MANY * expected_s) if expected_s else limits.cell_s
        deadline_s = min(longest_s, limits.cell_s)
        run = _Run(subject, cell, repeat, log, clock, deadline_s).execute(progress)
        log.add(run)
        progress.on_end(run)
        if run.failure:
            failures[cell.key] += 1
            if cell is cells[0] and not log.ended(cell):
                raise ScriptFailed(
                    "the baseline of the sweep does not run to its end",
                    where=str(log.folder / RUNS_NAME / f"{run.run}.log"),
                    why=run.failure,
                    fix="Read that output, correct the program or its arguments, and repeat the "
                    "command",
                )
    return left_out


def _order(cells: Sequence[Cell], limits: SweepLimits, log: SweepLog) -> list[tuple[Cell, int]]:
    """Return the runs that the log lacks, by turns."""
    waiting = []
    for repeat in range(1, limits.repeats + 1):
        turn = [cell for cell in cells if len(log.ended(cell)) < repeat]
        if repeat > 1:
            order = make_generator(limits.seed, "repeat", repeat).permutation(len(turn))
            turn = [turn[i] for i in order]
        waiting += [(cell, repeat) for cell in turn]
    return waiting


def _expected_s(cell: Cell, log: SweepLog) -> float:
    """Return the seconds that a run of a cell takes, by what ran before."""
    own = [run.elapsed_s for run in log.ended(cell)]
    return statistics.median(own or [run.elapsed_s for run in log.runs if not run.failure] or [0.0])


class _Run:
    """One run of a cell, from its plan to its figures."""

    def __init__(
        self,
        subject: Subject,
        cell: Cell,
        repeat: int,
        log: SweepLog,
        clock: Clock,
        deadline_s: float,
    ) -> None:
        self.subject = subject
        self.cell = cell
        self.repeat = repeat
        self.clock = clock
        self.deadline_s = deadline_s
        # Numbered by the log, so that a run that a kill cut short is in the way of nothing.
        self.name = f"{len(log.runs) + 1:03d}-{cell.key}"
        self.folder = log.folder / RUNS_NAME / self.name

    def execute(self, progress: SweepProgress) -> CellRun:
        """Run it; errors as `run_sweep`."""
        shutil.rmtree(self.folder, ignore_errors=True)
        begin_s, before = self.clock.now_s(), cpu_use()
        measured: dict[str, Any] = {}
        failure = self._failure(progress)
        if not failure:
            try:
                units = self.subject.units_per_step(self.cell)
                measured = measure_run(self.folder, units_per_step=units)
                measured["scores"] = read_scores(self._beside(".json"))
            except UsageError as problem:
                failure = str(problem)
        after = cpu_use()
        return CellRun(
            key=self.cell.key,
            name=self.cell.name,
            ranks=self.cell.ranks,
            settings=dict(self.cell.settings),
            repeat=self.repeat,
            run=self.name,
            elapsed_s=self.clock.now_s() - begin_s,
            failure=failure,
            foreign_cores=after.foreign_cores(before) if before and after else None,
            **measured,
        )

    def _beside(self, suffix: str) -> Path:
        return self.folder.with_name(self.name + suffix)

    def _failure(self, progress: SweepProgress) -> str:
        """Run the ranks to their end; return why they did not come to it."""
        subject, cell = self.subject, self.cell
        result = self._beside(".json")
        result.unlink(missing_ok=True)
        values = {
            **cell.settings,
            RANKS: str(cell.ranks),
            EPOCHS: str(subject.epochs),
            REPEAT: str(self.repeat),
            RESULT: str(result.resolve()),
        }
        job = claim_folder(
            prepare(
                subject.program,
                fill(subject.args, values),
                resolve(RunConfig),  # of `paceline run` here, without ranks: the plan has them
                self.folder,
                self.clock,
                plan=subject.plans.plan(cell),
            )
        )
        watch = _RunDeadline(self.deadline_s)
        try:
            with _output_in(self._beside(".log")), watch:
                execute(
                    job, machine=subject.machine, clock=self.clock, on_status=progress.on_status
                )
        except _FAILURES as problem:
            self._add_output(first_traceback(self.folder))
            return f"{problem.what}: {problem.why}" if problem.why else problem.what
        except (Interrupted, StopRequested):
            if not watch.is_over:
                raise
            return f"it took longer than {self.deadline_s:.0f} s"
        finally:
            ignore_preemption()  # all ranks have ended
        return ""

    def _add_output(self, text: str) -> None:
        """Add the traceback of a rank to what the ranks printed."""
        if text:
            append_lines(self._beside(".log"), text.splitlines())


class _RunDeadline:
    """Stops what this process runs by SIGTERM when it takes too long; `is_over` tells it apart.

    While ranks run, the launcher answers the signal, as any that stops a run; before and after, the
    handler here does.
    """

    def __init__(self, deadline_s: float) -> None:
        self.is_over = False
        self._has_ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(deadline_s, self._stop)
        self._timer.daemon = True
        self._handler: Any = None

    def _stop(self) -> None:
        with self._lock:
            if not self._has_ended:
                self.is_over = True
                os.kill(os.getpid(), signal.SIGTERM)

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        raise StopRequested(signal_name(number))

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGTERM, self._raise)
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._has_ended = True
        self._timer.cancel()
        signal.signal(signal.SIGTERM, self._handler)


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Send what the ranks print on stdout and stderr to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    commit_text(path, "")
    kept = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(file)
