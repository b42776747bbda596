"""The order of a step's events, and what was measured between them.

Two steps are recorded, on several ranks three. They write every tensor at once and read it when it
is needed, so that each interval shows the least memory that it can do with. The first one has costs
that no later step has (a kernel is chosen, state is created); what was measured in the last counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from paceline.training.out_of_core.process_memory import Memory, page_faults
from paceline.training.out_of_core.step_order import identity

EventKind = Literal["saved", "needed", "state", "end"]


class Event(NamedTuple):
    """One event of a step.

    Attributes:
        kind: a tensor is saved, a saved tensor is needed, the optimizer comes to the state of a
            parameter, the optimizer is done.
        number: of the tensor among the saved ones, or of the state.
        bytes: of a saved tensor's storage.
    """

    kind: EventKind
    number: int
    bytes: int


END = Event("end", 0, 0)


class _Watched(NamedTuple):
    number: int
    weak: int  # a weak reference of C++ to the storage


@dataclass(slots=True)
class ModuleRun:
    """One call of a module that may be recomputed.

    Attributes:
        begin: number of events before it.
        end: number of events before its end; None while it runs.
        tensors: saved in it, without its inputs.
        is_once: whether it ran once, and left its buffers as they were: running it again would
            change statistics of a batch norm a second time.
    """

    begin: int
    end: int | None = None
    tensors: list[int] = field(default_factory=list)
    is_once: bool = True


class AfterStep(NamedTuple):
    """The interval between a step and the next one."""

    compute_s: float = 0.0
    faults: int = 0
    peak_bytes: int = 0


@dataclass(slots=True)
class Recording:
    """What one recorded step showed; filled by the step's thread."""

    memory: Memory
    events: list[Event] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)  # pages that came from the system
    names: dict[int, str] = field(default_factory=dict)
    gone: dict[int, int] = field(
        default_factory=dict
    )  # of a saved tensor: when its memory was free
    # Of each module that ran: the events at its begin and end, and the tensors that it saved.
    modules: dict[str, ModuleRun] = field(default_factory=dict)
    _watched: list[_Watched] = field(default_factory=list)
    _module: ModuleRun | None = None  # that runs
    _inputs: set[int] = field(default_factory=set)  # of it
    _resumed_s: float | None = None
    _faults_before: int = 0

    def enter(self, event: Event) -> None:
        """Note an event; what comes until `leave` is not of the step."""
        self.close_interval()
        at = len(self.events)
        self.events.append(event)
        self._poll(at)

    def leave(self) -> None:
        """Go on with the step."""
        self.memory.start()
        self._faults_before = page_faults()
        self._resumed_s = time.monotonic()

    def close_interval(self) -> None:
        """End the interval after the last event."""
        if self._resumed_s is not None:
            self.memory.settle()
            self.compute_s.append(time.monotonic() - self._resumed_s)
            self.faults.append(page_faults() - self._faults_before)
            self.peak_bytes.append(self.memory.peak_bytes())
            self._resumed_s = None

    def after_step(self) -> AfterStep:
        """Return the interval that was closed last."""
        if not self.peak_bytes:
            return AfterStep()
        return AfterStep(self.compute_s[-1], self.faults[-1], self.peak_bytes[-1])

    def note_saved(self, index: int, tensor: torch.Tensor) -> None:
        """Note which tensor was saved, and in which module, and watch when its memory is free."""
        self.names[index] = _named(tensor)
        if self._module is not None and identity(tensor) not in self._inputs:
            self._module.tensors.append(index)
        self._watched.append(_Watched(index, tensor.untyped_storage()._weak_ref()))  # noqa: SLF001  # multiprocessing's

    def enter_module(self, name: str, inputs: list[torch.Tensor]) -> None:
        """Note that a module begins which may be recomputed."""
        if name in self.modules:
            self.modules[name].is_once = False
            return
        self._module = self.modules[name] = ModuleRun(len(self.events))
        self._inputs = {identity(tensor) for tensor in inputs}

    def leave_module(self, *, is_changed: bool) -> None:
        """Note that it ended, and whether it changed its buffers."""
        module, self._module = self._module, None
        if module is not None:
            module.end = len(self.events)
            module.is_once = module.is_once and not is_changed

    def _poll(self, at: int) -> None:
        alive = []
        for watched in self._watched:
            if torch.UntypedStorage._expired(watched.weak):  # noqa: SLF001  # as above
                torch.UntypedStorage._free_weak_ref(watched.weak)  # noqa: SLF001  # as above
                self.gone[watched.number] = at
            else:
                alive.append(watched)
        self._watched = alive

    def forget(self) -> None:
        """Free what watches memory."""
        for watched in self._watched:
            torch.UntypedStorage._free_weak_ref(watched.weak)  # noqa: SLF001  # as above
        self._watched = []


class OrderRecorder:
    """Records steps until two in a row have the same order.

    Args:
        memory: that the budget is for.
        least: steps to record.

    Attributes:
        step: that is recorded.
        steps: number of those that are over.
        after_step: the interval between the two.
    """

    def __init__(self, memory: Memory, least: int = 2) -> None:
        self._memory = memory
        self._least = least
        # The step before this one, until the first event of this one ends its last interval. A
        # module may begin earlier than that: it is of this step.
        self._before: Recording | None = None
        self._order: list[Event] | None = None  # of the step before this one
        self.step = Recording(memory)
        self.steps = 0
        self.after_step = AfterStep()

    def begin_step(self) -> None:
        """End the interval from the step before to this one."""
        before, self._before = self._before, None
        if before is not None:
            before.close_interval()
            self.after_step = before.after_step()
            before.forget()

    def end_step(self) -> bool:
        """Return whether enough is recorded: this step had the order of the one before."""
        self.steps += 1
        if self.steps >= self._least and self._order == self.step.events:
            self.step.forget()
            return True
        self._before, self._order = self.step, self.step.events
        self.step = Recording(self._memory)
        return False

    def forget(self) -> None:
        """Free what watches memory."""
        for recording in (self.step, self._before):
            if recording is not None:
                recording.forget()


def _named(tensor: torch.Tensor) -> str:
    node = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "saved tensor"
    return f"{node} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
