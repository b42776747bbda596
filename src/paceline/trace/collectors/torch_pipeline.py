"""Sees the actions of a pipeline's ranks: which stage computed which microbatch, and when.

An action's event lies around the phases and the waits in it, and is no phase itself. The values
that stages send each other are messages, which `torch_collectives` sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.native import monotonic_ns
from paceline.trace.collectors.torch_hooks import RecordedKind, around
from paceline.trace.format.events import MAIN, WITHOUT_GRADIENTS, Kind

if TYPE_CHECKING:
    from types import ModuleType

    from paceline.native import Recorder
    from paceline.trace.collectors.hook_registry import HookRegistry
    from paceline.trace.collectors.torch_hooks import Arguments, Keywords
    from paceline.trace.collectors.torch_marks import StepMarks


class PipelineRecorder:
    """Records the actions that `paceline.training` performs; used by the main thread alone."""

    def __init__(self, recorder: Recorder, hooks: HookRegistry, marks: StepMarks) -> None:
        self.recorder = recorder
        self.hooks = hooks
        self.marks = marks
        self._batch = 0  # number of the last one
        self.actions = RecordedKind("the actions of a pipeline's stages")

    def see_runtime(self, module: ModuleType) -> None:
        """See the actions of the runtime that a module has."""
        record, intern = self.recorder.record, self.recorder.intern

        def before(args: Arguments, _kwargs: Keywords) -> int:
            number = args[1].number
            if number == self._batch:
                self.marks.within_batch()
            self._batch = number
            return monotonic_ns()

        def after(begin_ns: int, _result: Any, args: Arguments, _kwargs: Keywords) -> None:
            _, step, (kind, stage, microbatch) = args
            record(
                int(Kind.STAGE),
                MAIN,
                intern(kind),
                begin_ns,
                monotonic_ns(),
                microbatch,
                sequence=step.number,
                tag=stage,
                flags=0 if step.is_training else WITHOUT_GRADIENTS,
            )

        runtime = module.PipelineRuntime
        performed = around(runtime.perform, self.actions, before, after)
        self.hooks.replace(runtime, "perform", performed)
