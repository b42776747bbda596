"""Marks where steps of a training loop may end.

Which of the marks end a step shows only later (a second optimizer may follow), so every candidate
is recorded as a step, and `paceline.trace.merge.steps` joins them. A mark costs about as much as
four events, so that weaker marks stop when a stronger one is seen: an optimizer's step is stronger
than a loader's batch, a batch stronger than a backward pass, and `paceline.step()` than all.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from paceline.core import step_mark
from paceline.trace.collectors.torch_hooks import RecordedKind, callback
from paceline.trace.format.events import BY_BACKWARD, BY_BATCH, BY_OPTIMIZER, BY_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.native import Recorder


class StepMarks:
    """Ends steps of the recorder; used by the main thread, but for `by_script`.

    Attributes:
        on_step: called in order at the end of each step, as a part of it.
        on_first: called once, when the first batch, forward pass or mark shows that the loop runs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.on_first: Callable[[], None] | None = None
        self.on_step: list[Callable[[], None]] = []
        self._by_optimizer = recorder.intern(BY_OPTIMIZER)
        self._by_batch = recorder.intern(BY_BATCH)
        self._by_backward = recorder.intern(BY_BACKWARD)
        self._by_script = recorder.intern(BY_SCRIPT)
        self._by_script_kind = RecordedKind("steps that the script marks")
        self._script_marks = False
        self._optimizer_steps = False
        self._loader_delivers = False
        self._batch = 0  # number of the loader whose batch the open step has
        self._went_backward = False  # in the open step

    def listen(self) -> Callable[[], None]:
        """Have `paceline.step()` mark steps; return what ends that."""
        step_mark.set_listener(callback(self._by_script_kind, self.by_script))
        return functools.partial(step_mark.set_listener, None)

    def by_script(self) -> None:
        """End a step, and from now on only here.

        Any thread may call this: the recorder's call holds the GIL, so that two cannot overlap.
        """
        self._script_marks = True
        self._end(self._by_script, 0)

    def by_optimizer(self, number: int) -> None:
        """Note the end of an optimizer's outermost step.

        Args:
            number: of the optimizer; 0 for all that stepped within a backward pass.
        """
        self._optimizer_steps = True
        if not self._script_marks:
            self._end(self._by_optimizer, number)

    def before_batch(self) -> None:
        """Note that a loader is asked for a batch."""
        if self._batch and not self._optimizer_steps and not self._script_marks:
            self._end(self._by_batch, self._batch)
        self._batch = 0

    def delivered(self, number: int) -> None:
        """Note that loader `number` delivered a batch."""
        self._loader_delivers = True
        self._batch = number
        self._note_loop()

    def before_forward(self) -> None:
        """Note that a forward pass begins which nothing encloses."""
        self._note_loop()
        if self._went_backward:
            self._went_backward = False
            if not (self._loader_delivers or self._optimizer_steps or self._script_marks):
                self._end(self._by_backward, 0)

    def after_backward(self) -> None:
        """Note that a backward pass ended which nothing encloses."""
        self._went_backward = True

    def within_batch(self) -> None:
        """Note that the next forward pass is of the same batch as the last backward pass."""
        self._went_backward = False

    def _end(self, name: int, number: int) -> None:
        self._went_backward = False
        for note in self.on_step:
            note()
        self.recorder.end_step(name, number)
        self._note_loop()

    def _note_loop(self) -> None:
        if self.on_first is not None:
            called, self.on_first = self.on_first, None
            called()
