"""Sees optimizer steps, and with them where a step of the training loop ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_hooks import RecordedKind, callback
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.collectors.torch_parameters import TrainedParameters
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.native import Recorder
    from paceline.trace.collectors.hook_registry import HookRegistry
    from paceline.trace.collectors.numbers import ObjectNumbers
    from paceline.trace.collectors.torch_hooks import Loop
    from paceline.trace.collectors.torch_marks import StepMarks
    from paceline.trace.collectors.torch_phases import PhaseRecorder

_OPTIMIZER = int(Kind.OPTIMIZER)


class StepRecorder:
    """The hooks of every optimizer's step; used by the main thread alone.

    An optimizer may step others inside its own step. Only the outermost one ends a step of the
    loop. The hook after a step does not come if the step raises, so the stack tells what is open.
    """

    def __init__(
        self,
        recorder: Recorder,
        loop: Loop,
        phases: PhaseRecorder,
        marks: StepMarks,
        optimizers: ObjectNumbers,
        available: frozenset[Capability],
        hooks: HookRegistry,
    ) -> None:
        self.recorder = recorder
        self.loop = loop
        self.phases = phases
        self.marks = marks
        self.optimizers = optimizers
        self.name = recorder.intern("step")
        self.trained = TrainedParameters(recorder)
        self.trains = RecordedKind("how many bytes of parameters the run trains")
        self.open: list[tuple[int, int]] = []  # (begin, phase around it) of steps not yet over
        self.step_code = internals.step_code() if Capability.STEP_CODE in available else None
        if Capability.OPTIMIZER_HOOKS in available:
            steps = RecordedKind(Capability.OPTIMIZER_HOOKS.value, self._leave_open_steps)
            before, after = callback(steps, self._before), callback(steps, self._after)

            def put() -> Callable[[], None]:
                handles = internals.hook_optimizer_steps(before, after)

                def remove() -> None:
                    for handle in handles:
                        handle.remove()

                return remove

            hooks.add(put)

    def _before(self, *_: Any) -> None:
        if threading.get_ident() != self.loop.main_thread:
            return
        if self.open and self.step_code is not None:
            outer_count = max(1, internals.frames_of(self.step_code)) - 1
            if outer_count < len(self.open):
                self.loop.phase = self.open[outer_count][1]  # that step raised, the script went on
                del self.open[outer_count:]
        self.open.append((self.recorder.begin(_OPTIMIZER), self.loop.phase))
        self.loop.phase = _OPTIMIZER
        self.phases.loss_begin_ns = 0

    def _after(self, optimizer: Any, *_: Any) -> None:
        if threading.get_ident() != self.loop.main_thread or not self.open:
            return
        number = self.optimizers.number_of(optimizer)
        if number not in self.trained.optimizers:
            self.trains.attempt(self.trained.note_first_step, optimizer, number)
        begin_ns, self.loop.phase = self.open.pop()
        if self.open:
            return
        self.recorder.end(_OPTIMIZER, self.name, begin_ns, 0, self.loop.phase, number)
        if self.loop.phase == int(Kind.BACKWARD):  # a step per parameter, as gradients come
            self.phases.stepped_in_backward = True
        else:
            self.marks.by_optimizer(number)

    def _leave_open_steps(self) -> None:
        if self.open:
            self.loop.phase = self.open[0][1]
            self.open.clear()
