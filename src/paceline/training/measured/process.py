"""Measures a step from a process without torch: one worker per rank of a node, all at once."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.core.affinity import allowed_cores, planned_cores
from paceline.core.allocator import AllocatorSetting, allocator_setting
from paceline.core.config import environment
from paceline.core.errors import Missing, ScriptFailed, WorkerFailed
from paceline.core.record import Record
from paceline.core.worker_process import WorkerCall, call_all
from paceline.training.capture_process import split_target
from paceline.training.measured.prices import PriceKey, keep_times, known_times
from paceline.training.measured.protocol import FormsAnswer, StepAnswer, StepRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.core.allocator import AllocatorChoice
    from paceline.core.measured_step import StepMeasurement
    from paceline.training.measured.protocol import CpuSpan, StepForm

A = TypeVar("A", bound=Record)
DEADLINE_S = 300.0
ROUND_S, BUDGET_S = 0.8, 0.02
FORM_ROUND_S = 0.25
_WORKER = "paceline.training.measured.worker"


def measure_step(
    target: str,
    *,
    machine_digest: str,
    ranks: int = 1,
    threads: int = 1,
    allocator: AllocatorChoice = "keep",
    deadline_s: float = DEADLINE_S,
) -> StepMeasurement:
    """Return a training step of ``FILE.py:FUNCTION`` as it was measured on this machine.

    The step runs: its model is made, and trained on the batch for a few seconds.

    Args:
        target: ``FILE.py:FUNCTION``; the function takes no argument.
        machine_digest: of the Machine on which times of operators are kept.
        ranks: that run the step at the same time on this node, without communication.
        threads: compute threads of each.
        allocator: of the ranks.
        deadline_s: for all of it.

    Raises:
        Missing: torch is not installed.
        NotFound: there is no such file.
        UsageError: the function does not exist, or does not return what a training step needs.
        ScriptFailed: the user's code raised or ended the process; its output went to stderr.
        DeadlineExceeded: it took too long.
        StorageError: the times cannot be kept.
    """
    setting = allocator_setting(allocator, environment())
    key = PriceKey(
        machine=machine_digest,
        torch=torch_version(),
        allocator=setting.in_effect,
        threads=threads,
        processes=ranks,
    )
    known = known_times(key)
    job = _StepProcesses(target=target, ranks=ranks, setting=setting, deadline_s=deadline_s)
    allowed = allowed_cores()
    answers = job.ask(
        StepAnswer,
        lambda rank: {
            "cores": planned_cores(allowed, rank, ranks, threads) if ranks > 1 else (),
            "threads": threads,
            "known": known,
            "round_s": ROUND_S,
        },
    )
    step = combined(answers)
    keep_times(key, known, step)
    return step


def measure_forms(
    target: str,
    forms: Sequence[StepForm],
    *,
    ranks: int = 1,
    allocator: AllocatorChoice = "keep",
    deadline_s: float = DEADLINE_S,
) -> tuple[StepMeasurement, ...]:
    """Return forms of the training step of ``FILE.py:FUNCTION`` as they were measured here.

    All forms are trained in the same processes, in turn, for about a second each. No operator is
    timed alone, and memory is not measured.

    Args:
        target: ``FILE.py:FUNCTION``; the function takes no argument.
        forms: how a rank computes its share of a batch.
        ranks: that run the step at the same time on this node, without communication.
        allocator: of the ranks.
        deadline_s: for all of it.

    Raises:
        PacelineError: as `measure_step`.
    """
    torch_version()
    setting = allocator_setting(allocator, environment())
    job = _StepProcesses(target=target, ranks=ranks, setting=setting, deadline_s=deadline_s)
    allowed = allowed_cores()

    def cores(rank: int, form: StepForm) -> tuple[int, ...]:
        return planned_cores(allowed, rank, ranks, form.threads) or allowed

    answers = job.ask(
        FormsAnswer,
        lambda rank: {
            "cores": (),
            "threads": forms[0].threads,
            "known": {},
            "round_s": FORM_ROUND_S,
            "forms": tuple(forms),
            "cores_of_forms": tuple(cores(rank, form) for form in forms),
        },
    )
    return tuple(
        combined([answer.forms[number] for answer in answers], shared=cores(0, form) == allowed)
        for number, form in enumerate(forms)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _StepProcesses:
    """Processes that measure a step at the same time, one for each rank."""

    target: str
    ranks: int
    setting: AllocatorSetting
    deadline_s: float

    def ask(self, answer: type[A], details: Callable[[int], dict[str, Any]]) -> tuple[A, ...]:
        """Return the answer of each process to its request.

        Args:
            answer: its type.
            details: called with a rank: the fields of its request that differ between requests.

        Raises:
            PacelineError: see `measure_step`.
        """
        path, function = split_target(self.target)
        with tempfile.TemporaryDirectory(prefix="paceline-measure-") as folder:
            works = [
                WorkerCall(
                    module=_WORKER,
                    request=StepRequest(
                        path=str(path),
                        function=function,
                        rank=rank,
                        ranks=self.ranks,
                        allocator=self.setting.in_effect,
                        store=str(Path(folder) / "store"),
                        deadline_s=self.deadline_s,
                        budget_s=BUDGET_S,
                        **details(rank),
                    ),
                    answer=answer,
                    name=f"measurement of {self.target}",
                    show_output=rank == 0,
                    environment=self.setting.variables,
                )
                for rank in range(self.ranks)
            ]
            try:
                return call_all(works, deadline_s=self.deadline_s)
            except WorkerFailed as problem:
                raise ScriptFailed(
                    "the step could not be measured",
                    where=self.target,
                    why=f"{problem.what}: {problem.why}",
                    fix="Run the script alone, or plan with --compute rates, which does not run it",
                ) from problem


def torch_version() -> str:
    """Return the version of the torch that is installed, without importing it.

    Raises:
        Missing: none is.
    """
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise Missing(
            "torch is not installed",
            why="a step is measured with the framework that trains",
            fix="pip install 'paceline[torch]', or plan with --compute rates",
        ) from None


def combined(answers: Sequence[StepAnswer], *, shared: bool = False) -> StepMeasurement:
    """Return the step of ranks that measured at the same time.

    Times are means over the ranks; of each whole step the slowest rank counts, and what it is later
    than the ranks on average is waiting.

    Args:
        answers: of each rank.
        shared: whether all ran on the same cores; ranks that outnumber cores always do.
    """
    first = answers[0].step
    phases = {
        name: dataclasses.replace(
            phase,
            operators_s=_mean(answer.step.phases[name].operators_s for answer in answers),
            residual_s=_mean(answer.step.phases[name].residual_s for answer in answers),
            low_s=min(answer.step.phases[name].low_s for answer in answers),
            high_s=max(answer.step.phases[name].high_s for answer in answers),
        )
        for name, phase in first.phases.items()
    }
    waiting_s = meeting_s = 0.0
    if len(answers) > 1:
        slowest_s = _slowest(answer.whole_s for answer in answers)
        own_s = _mean(statistics.median(answer.whole_s) for answer in answers)
        waiting_s = max(0.0, slowest_s - own_s)
        if all(answer.met_s for answer in answers):
            meeting_s = max(0.0, _slowest(answer.met_s for answer in answers) - slowest_s)
    return dataclasses.replace(
        first,
        phases=phases,
        waiting_s=waiting_s,
        meeting_s=meeting_s,
        reduced_s=_mean(answer.step.reduced_s for answer in answers),
        peak_bytes=max(answer.step.peak_bytes for answer in answers),
        base_bytes=max(answer.step.base_bytes for answer in answers),
        foreign_cores=_foreign_cores([answer.cpu for answer in answers], shared=shared),
    )


def _slowest(steps: Iterable[Sequence[float]]) -> float:
    """Return the median seconds of a step on its slowest rank."""
    slowest: list[float] = [max(step) for step in zip(*steps, strict=True)]
    return statistics.median(slowest)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _foreign_cores(spans: Sequence[CpuSpan | None], *, shared: bool) -> float:
    """Return the cores that others used; ranks with cores of their own each saw these alone."""
    known = [span for span in spans if span is not None]
    if not known:
        return 0.0
    shared = shared or len(known) > len(allowed_cores())
    busy_s = known[0].busy_s if shared else sum(span.busy_s for span in known)
    own_s = sum(span.own_s for span in known)
    return max(0.0, (busy_s - own_s) / max(span.span_s for span in known))
