"""The order of a step's events, and what was measured between them.

Two steps are recorded. Both write every tensor at once and read it when it is needed, so that each
interval shows the least memory that it can do with. The first one has costs that no later step has
(a kernel is chosen, state is created); what was measured in the second one counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from paceline.schedules.memory import ManagedTensor, RecomputedModule, StepProfile
from paceline.training.out_of_core.process_memory import ProcessMemory, page_faults

LEAST_PART = 0.25  # of an interval is computing, however many pages it took

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

    memory: ProcessMemory
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
            self.compute_s.append(time.monotonic() - self._resumed_s)
            self.faults.append(page_faults() - self._faults_before)
            self.peak_bytes.append(self.memory.peak_bytes())
            self._resumed_s = None

    def after_step(self) -> AfterStep:
        """Return the interval that was closed last."""
        if not self.peak_bytes:
            return AfterStep()
        return AfterStep(self.compute_s[-1], self.faults[-1], self.peak_bytes[-1])

    def watch(self, index: int, storage: torch.UntypedStorage) -> None:
        """Note when the memory of a saved tensor, which is written, is free."""
        self._watched.append(_Watched(index, storage._weak_ref()))  # noqa: SLF001  # multiprocessing's

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


def profile_of(
    recording: Recording, state_bytes: dict[int, int], after_step: AfterStep, fault_s: float
) -> tuple[StepProfile, dict[tuple[str, int], int]]:
    """Return the profile of a recorded step, and the index in it of each tensor by kind and index.

    Args:
        recording: of one step, complete.
        state_bytes: of the optimizer's state, by its index.
        after_step: the interval before the next step.
        fault_s: seconds that a page took which came from the system; not counted as computing.
    """
    events = recording.events
    saved: dict[int, int] = {}
    needed: dict[int, int] = {}
    tensors: list[ManagedTensor] = []
    places: dict[tuple[str, int], int] = {}
    for at, event in enumerate(events):
        if event.kind == "saved":
            saved[event.number] = at
        elif event.kind == "needed":
            needed.setdefault(event.number, at)
    for index, begin in saved.items():
        # What no backward pass needs may be held until the step ends.
        end = needed.get(index, len(events) - 1)
        gone = recording.gone.get(index)
        if gone is None or gone > end:
            continue  # in memory all the time for other reasons
        places["activation", index] = len(tensors)
        name = recording.names.get(index, f"saved tensor {index}")
        # It became free somewhere in the interval before the event that saw it.
        idle = max(begin, gone - 1)
        tensors.append(ManagedTensor(name, "activation", events[begin].bytes, begin, idle, end))
    for at, event in enumerate(events):
        if event.kind == "state" and state_bytes.get(event.number):
            places["optimizer", event.number] = len(tensors)
            after = at + 1 - len(events)
            tensors.append(
                ManagedTensor(
                    f"state {event.number}",
                    "optimizer",
                    state_bytes[event.number],
                    after,
                    after,
                    at,
                )
            )
    last = len(events) - 1
    compute_s = [
        max(seconds - faults * fault_s, LEAST_PART * seconds)
        for seconds, faults in zip(
            [*recording.compute_s[:last], after_step.compute_s],
            [*recording.faults[:last], after_step.faults],
            strict=True,
        )
    ]
    floor = [*recording.peak_bytes[:last], after_step.peak_bytes]
    profile = StepProfile(
        compute_s=tuple(compute_s),
        floor_bytes=tuple(floor),
        tensors=tuple(tensors),
        modules=_recomputed_modules(recording, compute_s, tensors, places),
    )
    return profile, places


def _recomputed_modules(
    recording: Recording,
    compute_s: list[float],
    tensors: list[ManagedTensor],
    places: dict[tuple[str, int], int],
) -> tuple[RecomputedModule, ...]:
    """Return the modules that can be recomputed: they ran once, and saved something."""
    found = []
    for name, run in recording.modules.items():
        members = tuple(
            places["activation", number]
            for number in run.tensors
            if ("activation", number) in places
        )
        if not members or run.end is None or not run.is_once:
            continue
        needed = min(tensors[place].needed for place in members)
        if all(tensors[place].idle <= needed for place in members):
            seconds = sum(compute_s[max(run.begin - 1, 0) : run.end])
            found.append(RecomputedModule(name, seconds, needed, members))
    return tuple(found)
