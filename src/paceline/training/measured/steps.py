"""Runs whole training steps of a model, as its script would, and times their phases."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import UsageError
from paceline.core.machine import Phase
from paceline.training.capture import TrainingStep, call_arguments, loss_in
from paceline.training.out_of_core.recompute import recompute_always

if TYPE_CHECKING:
    from paceline.training.measured.protocol import StepForm
    from paceline.training.pipeline.workload import ResizableBatch

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
WARM_STEPS, LEAST_STEPS, MOST_STEPS = 3, 4, 400
BLOCKS = 2  # into which a round is cut: the medians of all blocks are the interval


@dataclass(slots=True)
class StepRunner:
    """One model in training.

    Attributes:
        step: the model, its batch, its loss.
        optimizer: of its parameters; None: no update.
        phase: called with the phase that begins, and with None at the end of a step.
    """

    step: TrainingStep
    optimizer: torch.optim.Optimizer | None
    phase: Callable[[Phase | None], None] = field(default=lambda _: None)

    def run(self, meet: Callable[[], None] = lambda: None) -> tuple[float, float, float]:
        """Run a step; return the seconds of forward, backward and optimizer.

        Args:
            meet: called before the update, which counts it: what waits for the other ranks.
        """
        module, optimizer = self.step.module, self.optimizer
        begin = time.perf_counter()
        self.phase("forward")
        if optimizer is not None:
            optimizer.zero_grad()
        else:
            module.zero_grad()
        forward_s = backward_s = 0.0
        for _ in range(self.step.accumulation):
            self.phase("forward")
            loss = loss_of(self.step, module)
            middle = time.perf_counter()
            self.phase("backward")
            loss.backward()
            end = time.perf_counter()
            forward_s, backward_s = forward_s + middle - begin, backward_s + end - middle
            begin = end
        self.phase("optimizer")
        meet()
        if optimizer is not None:
            optimizer.step()
        self.phase(None)
        return forward_s, backward_s, time.perf_counter() - begin


@dataclass(slots=True)
class WholeSteps:
    """The seconds of whole steps, in rounds.

    Attributes:
        rounds: each a list of steps, each the seconds of its phases.
        met_s: seconds of steps, one after the other, in which the ranks meet.
    """

    rounds: list[list[tuple[float, float, float]]] = field(default_factory=list)
    met_s: list[float] = field(default_factory=list)

    def steps(self) -> list[tuple[float, float, float]]:
        """Return all steps."""
        return [step for steps in self.rounds for step in steps]

    def step_s(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(sum(step) for step in self.steps())

    def phase(self, number: int) -> tuple[float, float, float]:
        """Return the median seconds of a phase, and the least and largest median of a block."""
        seconds = [[step[number] for step in steps] for steps in self.rounds]
        blocks = [statistics.median(block) for steps in seconds for block in _blocks(steps)]
        middle = statistics.median(value for steps in seconds for value in steps)
        return middle, min(blocks), max(blocks)


def _blocks(values: list[float]) -> list[list[float]]:
    each = -(-len(values) // BLOCKS)
    return [values[begin : begin + each] for begin in range(0, len(values), each)]


def run_round(
    runner: StepRunner,
    times: WholeSteps,
    *,
    round_s: float,
    synchronize: Callable[[], None],
    agree: Callable[[float], float],
    least: int = LEAST_STEPS,
    meet: Callable[[], None] | None = None,
) -> None:
    """Run steps for about `round_s` seconds, after a few that warm up.

    Args:
        runner: whose steps run.
        times: gets the round.
        round_s: at least `least` steps run, however long they take.
        synchronize: waits for the other processes, before each step.
        agree: returns the value of the leading process: all run as many steps.
        least: steps of the round, and at most so many warm up.
        meet: waits for the other processes within steps; half as many steps do that.
    """
    warm = []
    for _ in range(min(WARM_STEPS, least)):
        synchronize()
        warm.append(sum(runner.run()))
    count = int(agree(max(least, min(MOST_STEPS, round_s / max(min(warm), 1e-6)))))
    steps = []
    for _ in range(count):
        synchronize()
        steps.append(runner.run())
    times.rounds.append(steps)
    if meet is not None:
        synchronize()
        met_s = [sum(runner.run(meet)) for _ in range(1 + max(least, count // 2))]
        times.met_s += met_s[1:]


def loss_of(step: TrainingStep, module: torch.nn.Module) -> torch.Tensor:
    """Return the loss of a forward pass.

    Args:
        step: the batch and its loss.
        module: the step's, or what wraps it.

    Raises:
        UsageError: it cannot be differentiated.
    """
    arguments, keywords = call_arguments(step.module, step.inputs)
    output = module(*arguments, **keywords)
    if step.loss_fn is None:
        loss = loss_in(output)
    else:
        loss = step.loss_fn(output) if step.target is None else step.loss_fn(output, step.target)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise UsageError(
            "there is no loss to differentiate",
            where=type(step.module).__name__,
            fix="Give a loss_fn that returns a tensor which depends on the parameters",
        )
    return loss


def formed(step: TrainingStep, form: StepForm, batch: ResizableBatch) -> TrainingStep:
    """Return the step in a form.

    Args:
        step: whose model is changed.
        form: of the step.
        batch: of the same step, or of another one with an equal model.
    """
    if form.recompute:
        recompute_always(step.module)
    part = batch.with_values(form.samples)
    return replace(step, inputs=part.inputs, target=part.target, accumulation=form.passes)


def make_runner(step: TrainingStep) -> StepRunner:
    """Return what runs the steps of a model; the model itself is trained."""
    optimizer: Any = step.optimizer(step.module.parameters()) if step.optimizer else None
    return StepRunner(step=step, optimizer=optimizer)
