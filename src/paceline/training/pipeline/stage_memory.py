"""Captures the memory events of a step of each stage of a model, without running it.

    schedule of a rank          F0 F1 B0 F2 B1 B2 update
    on fake tensors             the stage's own passes, in this order, as `computing` runs them
    `out_of_core.capturing`     tensors saved and needed, memory and work between these events

What other stages send has the shapes that their forward passes give it, and arrives when it is
used. So a stage that keeps the activations of several microbatches shows them all, and when each
is needed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.errors import UsageError
from paceline.schedules.pipeline import ORDERS
from paceline.training.capture import fake_copy, fake_values, loss_in
from paceline.training.out_of_core.capturing import EventCapture, bytes_beside
from paceline.training.out_of_core.recording import END
from paceline.training.pipeline.computing import ComputeOptions, StageComputing
from paceline.training.pipeline.graph import capture as capture_graph
from paceline.training.pipeline.microbatches import sizes_of, split
from paceline.training.pipeline.stages import cut
from paceline.training.pipeline.workload import arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.core.plan import PipelineChoice
    from paceline.schedules.memory import StepEvents
    from paceline.schedules.pipeline import PipelineAction
    from paceline.training.capture import TrainingStep
    from paceline.training.pipeline.stages import ModelStage, StagedModel


def capture_stages(
    step: TrainingStep, cuts: Sequence[int], *, microbatches: int, schedule: PipelineChoice
) -> tuple[StepEvents, ...]:
    """Return the events of a step of each stage, in the order of data flow.

    Args:
        step: the model and the batch of a replica; with an optimizer.
        cuts: first layer of each stage but the first.
        microbatches: of the batch, at most.
        schedule: order in which the stages compute them.

    Raises:
        UsageError: there is no optimizer, or the model cannot be captured or cut.
    """
    if step.optimizer is None:
        raise UsageError(
            "a step out of core ends with the optimizer's update",
            where=type(step.module).__name__,
            fix="Let the function return the optimizer, a function of the parameters, too",
        )
    beside = bytes_beside(step)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    module = fake_copy(step.module, fake)
    inputs, target = fake_values(step.inputs, fake), fake_values(step.target, fake)
    captured = capture_graph(module, inputs, split_points=step.split_points)
    staged = cut(captured, cuts)
    arguments = arguments_of(captured, inputs)
    samples = next(x.shape[0] for x in tree_leaves(arguments) if isinstance(x, torch.Tensor))
    sizes = sizes_of(samples, microbatches)
    order = ORDERS[schedule](len(staged.stages), len(sizes))
    with fake:
        parts = split(arguments, sizes)
        values = [_values(staged, part) for part in parts]
        found = []
        for stage, actions in zip(staged.stages, order.actions, strict=True):
            capture = _StageCapture(
                stage, step, parts, split(target, sizes), values, [arguments, target]
            )
            with capture.watching():
                capture.run_stage(actions)
            found.append(capture.found(beside))
    return tuple(found)


def _values(staged: StagedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what stages send each other for a microbatch, by name."""
    values: dict[str, Any] = {}
    for stage in staged.stages:
        given = [arguments[name] for name in stage.inputs]
        sent = stage.module(*given, *(values[name] for name in stage.received))
        values.update(zip(stage.outputs, sent, strict=False))
    return values


class _StageCapture(EventCapture):
    """Runs the steps of a stage; its passes come in the order of a schedule."""

    def __init__(
        self,
        stage: ModelStage,
        step: TrainingStep,
        parts: list[dict[str, Any]],
        targets: list[Any],
        values: list[dict[str, Any]],
        batch: Any,
    ) -> None:
        used = {id(parameter) for parameter in stage.module.parameters()}
        unused = [p for p in stage.parameters.values() if id(p) not in used]
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        super().__init__(stage.module, [*tensors, *unused])
        self._stage, self._step = stage, step
        self._parts, self._targets, self._values = parts, targets, values
        options = ComputeOptions(loss_fn=lambda outputs, _: loss_in(outputs))
        self._computing = StageComputing(stage, options)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch saved tensors and operators; modules of a stage are not computed again."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, self._need)
        with hooks, self:
            yield

    def run_stage(self, actions: Sequence[PipelineAction]) -> None:
        """Run a step that makes the optimizer's state, one that counts, and the next one."""
        assert self._step.optimizer is not None
        optimizer = self._step.optimizer(list(self._stage.parameters.values()))
        defers = any(action.kind == "backward_weight" for action in actions)
        for number in range(3):
            self._is_recorded = number > 0
            self._order.begin_step()
            self._phase = "optimizer"
            optimizer.zero_grad()
            for action in actions:
                self._perform(action, defers=defers)
            self._phase = "optimizer"
            if number < 2:
                self._update(optimizer)
                self._event(END)
                self._is_over = self._is_recorded

    def _perform(self, action: PipelineAction, *, defers: bool) -> None:
        self._phase = "forward" if action.kind == "forward" else "backward"
        number = action.microbatch
        if action.kind == "forward":
            received = {
                name: tree_map(_arrived, self._values[number][name])
                for name in self._stage.received
            }
            self._computing.forward(
                number, self._parts[number], received, self._loss_of(number), defers=defers
            )
        elif action.kind == "backward_weight":
            self._computing.backward_weight(number)
        else:
            gradients = {
                name: [_gradient(leaf) for leaf in tree_leaves(self._values[number][name])
                       if isinstance(leaf, torch.Tensor)]
                for name in self._stage.outputs
            }  # fmt: skip
            self._computing.backward(number, gradients)

    def _loss_of(self, number: int) -> Callable[[Any], torch.Tensor]:
        def loss_of(outputs: Any) -> torch.Tensor:
            loss_fn, target = self._step.loss_fn, self._targets[number]
            if loss_fn is None:
                loss = loss_in(outputs)
                assert isinstance(loss, torch.Tensor)
                return loss
            return loss_fn(outputs) if target is None else loss_fn(outputs, target)

        return loss_of


def _arrived(value: Any) -> Any:
    """Return memory for a received tensor; a plain value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value.detach()).requires_grad_(value.requires_grad)


def _gradient(value: torch.Tensor) -> torch.Tensor | None:
    return torch.empty_like(value.detach()) if value.requires_grad else None
