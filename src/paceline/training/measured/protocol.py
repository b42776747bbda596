"""What `process` asks of `worker`, and its answer; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.measured_step import OperatorTime, StepMeasurement
from paceline.core.worker_process import WorkerMessage


class StepForm(NamedTuple):
    """A way to compute the share of a batch that a rank has.

    Attributes:
        threads: for compute.
        samples: of one forward and backward pass.
        passes: before an update.
        recompute: whether the layers of `recompute.recomputable` keep their inputs alone.
    """

    threads: int
    samples: int
    passes: int
    recompute: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest(WorkerMessage):
    """The task of one of `ranks` processes that measure the same step at the same time.

    Attributes:
        path: of the Python file.
        function: its name in that file; it returns what a training step needs.
        rank: of this process.
        ranks: of all.
        cores: to run on; empty: any.
        threads: for compute.
        allocator: that the environment of the process sets.
        store: path of the file through which the ranks find each other; unused for one rank.
        deadline_s: for each wait of a rank for the others.
        known: times of operators by signature, which are not measured again.
        round_s: seconds of one of the rounds of whole steps.
        budget_s: seconds for one operator.
        forms: of the step, whose whole steps are timed in turn, and no operator; empty: the step as
            the function returns it.
        cores_of_forms: of each form, as `cores`.
    """

    path: str
    function: str
    rank: int
    ranks: int
    cores: tuple[int, ...]
    threads: int
    allocator: str
    store: str
    deadline_s: float
    known: dict[str, OperatorTime]
    round_s: float
    budget_s: float
    forms: tuple[StepForm, ...] = ()
    cores_of_forms: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuSpan(WorkerMessage):
    """CPU time on the cores of a process while it measured, in seconds.

    Attributes:
        span_s: that passed.
        busy_s: of all processes on these cores.
        own_s: of this process.
    """

    span_s: float
    busy_s: float
    own_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAnswer(WorkerMessage):
    """The measurement of one process.

    Attributes:
        step: with what other work used left open.
        whole_s: seconds of each whole step; step i ran at the same time in all processes.
        met_s: of steps in which the processes reduced a number; empty where each has a core.
        cpu: None where the kernel does not say.
    """

    step: StepMeasurement
    whole_s: tuple[float, ...]
    met_s: tuple[float, ...] = ()
    cpu: CpuSpan | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FormsAnswer(WorkerMessage):
    """The measurement of one process, where forms of the step were asked for.

    Attributes:
        forms: a measurement for each, in the order of the request.
    """

    forms: tuple[StepAnswer, ...]
