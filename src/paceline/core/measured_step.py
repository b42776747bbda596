"""The StepMeasurement: what the operators of a training step cost on the device at hand.

`training.measured` runs a few steps of a model, times each distinct operator of a step alone, and
`perf` predicts from that in place of the rates of operator classes. A distinct operator is one
name with one set of shapes, strides, dtypes and scalar arguments; the calls of one are equal work.

::

    seconds of a phase  =  sum over its distinct operators of count * seconds   (timed alone)
                           + residual   (whole steps minus that sum)

The residual is Python, modules and autograd. It is negative where an operator finds its inputs in
the cache in which the operator before it left them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.core.machine import Phase  # noqa: TC001  # `from_json` asks for the types of rows
from paceline.core.record import Record

ComputeChoice = Literal["auto", "measured", "rates"]


class OperatorTime(NamedTuple):
    """Seconds of one distinct operator's call, alone, with cold inputs.

    Attributes:
        seconds: median over the calls.
        low_s: lower quartile.
        high_s: upper quartile.
    """

    seconds: float
    low_s: float
    high_s: float


class OperatorCalls(NamedTuple):
    """Equal calls of an operator in a step.

    Attributes:
        phase: of the step.
        signature: name, shapes, strides, dtypes and scalar arguments.
        calls: per step.
        time: of one call; None if the operator could not be called alone.
    """

    phase: Phase
    signature: str
    calls: int
    time: OperatorTime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPhase(Record):
    """A phase of the step, in seconds.

    Attributes:
        operators_s: sum over the operators, each timed alone.
        residual_s: what a whole step takes beyond that sum.
        low_s: of the phase in whole steps: the smallest median of a round.
        high_s: the largest.
    """

    operators_s: float
    residual_s: float
    low_s: float
    high_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the phase."""
        return self.operators_s + self.residual_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement(Record):
    """A training step of one rank without communication, measured on the device at hand.

    Attributes:
        torch: its version.
        threads: compute threads of each process.
        processes: that ran the same step on the node at the same time.
        allocator: of these processes: ``keep``, ``system`` or ``own``.
        phases: forward, backward and optimizer.
        operators: of a step, by phase.
        waiting_s: by which the slowest process of a step is later than the processes on average.
        meeting_s: by which a step is longer in which processes that outnumber the cores reduce a
            number: each waits for a core, as often as it waits for the others.
        reduced_bytes: of the gradients of the step, at most those of a bucket; 0: one process.
        reduced_s: of gloo's all-reduce of as many between the processes, timed beside the steps.
        peak_bytes: resident memory of a process at the peak of its whole steps.
        base_bytes: resident memory before the model was made: interpreter, torch, imports.
        foreign_cores: that other work used meanwhile, on average.
        whole_steps: how many ran.
    """

    torch: str
    threads: int
    processes: int
    allocator: str
    phases: dict[str, MeasuredPhase]
    operators: tuple[OperatorCalls, ...]
    waiting_s: float = 0.0
    meeting_s: float = 0.0
    reduced_bytes: int = 0
    reduced_s: float = 0.0
    peak_bytes: int = 0
    base_bytes: int = 0
    foreign_cores: float = 0.0
    whole_steps: int = 0

    @property
    def calls(self) -> int:
        """Calls of operators in a step."""
        return sum(equal.calls for equal in self.operators)

    @property
    def untimed(self) -> tuple[OperatorCalls, ...]:
        """The operators that could not be called alone: their time is part of the residual."""
        return tuple(equal for equal in self.operators if equal.time is None)
