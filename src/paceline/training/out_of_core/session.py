"""Runs training steps under a memory budget: records two, makes a plan, and carries it out.

    record -> record again -> plan
      ^                        |  another order: the rest of the step as when it is recorded
      +--- twice in a row -----+

Every event of a step (`recording.Event`) passes through `arrive`. Under a plan it compares the
event with the recorded one, starts and awaits the transfers that the plan has there, and so holds
the budget by order, not by time. Where the order differs, everything is written at once and read
when it is needed, which is always right, and slow.

All of it runs in the step's thread: autograd runs a backward pass on CPU in the thread that calls
it. Only `Managed.forget_source` runs in the writer's.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.core.errors import MemoryExceeded
from paceline.schedules.memory import SpillTier, load_solver, plan_memory, target_budget_bytes
from paceline.training.out_of_core.managed import Managed, own_bytes, storage_bytes, version_of
from paceline.training.out_of_core.process_memory import Allocator, ProcessMemory
from paceline.training.out_of_core.recording import Event, ModuleRun, Recording, profile_of
from paceline.training.out_of_core.spill_file import SpillFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.schedules.memory import MemoryPlan, StepProfile

LEAST_BYTES = 1 << 16  # smaller tensors stay: a transfer would cost more than they free
VIEW_PART = 8  # a view of less than this part of its storage belongs to a larger thing, a data set
GROWTH_MARGIN = 1.25  # holes between tensors that do not fit the next ones
SLACK_PART = 1 / 64  # of the budget, for objects of Python and small blocks
DIVERGED_STEPS = 2  # in a row, after which the order is recorded again
RECORDED_STEPS = 12  # without two of the same order: planning is given up

Mode = Literal["record", "plan", "diverged", "unplanned"]


@dataclass(slots=True)
class Counters:
    """What the steps under a plan came to; times in seconds."""

    steps: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    diverged: int = 0
    trims: int = 0


class Session:
    """The steps of one training in this process.

    Args:
        budget_bytes: that the process's memory stays under, without pages of files.
        folder: of the spill file.
        say: is called with each line for the user.
    """

    def __init__(self, budget_bytes: int, folder: Path, say: Callable[[str], None]) -> None:
        self.budget_bytes = budget_bytes
        load_solver()
        self.memory = ProcessMemory()
        try:
            self.file = SpillFile(folder)
        except BaseException:
            self.memory.close()
            raise
        self.allocator = Allocator()
        self.allocator.give_back_at_once()
        self.plan: MemoryPlan | None = None
        self.profile: StepProfile | None = None
        self.counters = Counters()
        self.mode: Mode = "record"
        self.states: dict[int, Managed] = {}
        self.say = say
        self._recording = Recording(self.memory)
        self._before: list[Event] | None = None  # the order of the recorded step before this one
        self._after_step = (0.0, 0)
        self._recorded = 0
        self._order: list[Event] = []
        self._places: dict[tuple[str, int], int] = {}
        self._due: dict[int, list[int]] = {}
        self._starts: dict[int, list[int]] = {}
        self._at = 0
        self._saved = 0
        self._current: dict[int, weakref.ref[Managed]] = {}  # by index in the profile
        self._by_storage: dict[tuple[int, int | None], weakref.ref[Managed]] = {}
        self._used: set[int] = set()  # saved tensors that were needed in this step
        self._diverged_in_a_row = 0
        self._begin_s: float | None = None
        self._growth: list[int] = []  # of memory in each interval, with the tensors of the step
        self._waited_s = self._moved_before_s = 0.0
        self.recompute: Callable[[tuple[str, ...]], None] | None = None  # these modules, or none
        self._first_plan: MemoryPlan | None = None  # which chose the modules that are recomputed
        self._recomputed_s = 0.0
        self._module: ModuleRun | None = None  # that runs and is recorded
        self._inputs: set[int] = set()
        self._pid = os.getpid()
        self._is_closed = False
        self._updated: Managed | None = None

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The most memory of the process under the plan; None without one.

        Where the plan spills, freed memory fills what the tensors leave of the budget.
        """
        if self.plan is None:
            return None
        return self.plan.peak_bytes if self.plan.method == "fits" else self.budget_bytes

    # --- saved tensors ---------------------------------------------------------------------------

    def save(self, tensor: torch.Tensor) -> Managed | None:
        """Take a tensor that is saved for the backward pass; None if it stays as it is."""
        if not is_plain(tensor) or os.getpid() != self._pid:  # a forked process has no threads
            return None
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage._cdata  # noqa: SLF001  # identity of a storage
        if size < LEAST_BYTES or _is_parameter(tensor) or tensor.nbytes * VIEW_PART < size:
            return None
        version = version_of(tensor)
        known = self._by_storage.get((key, version))
        managed = known() if known is not None else None
        if managed is not None:
            return managed
        index = self._saved
        self._saved += 1
        managed = Managed(self.file, index, [storage_bytes(tensor)], tensor.detach())
        self._by_storage[key, version] = weakref.ref(managed)
        with _Pause(self, Event("saved", index, size)) as at:
            if self.mode == "plan":
                place = self._places.get(("activation", index))
                if place is not None:
                    self._follow(place, managed)
                self._settle(at)
            else:
                if self.mode == "record":
                    self._recording.names[index] = _named(tensor)
                    if self._module is not None and key not in self._inputs:
                        self._module.tensors.append(index)
                    self._recording.watch(index, storage)
                self._away(managed)
        return managed

    def need(self, managed: Managed) -> tuple[torch.UntypedStorage, int]:
        """Return the storage of a saved tensor, and the bytes before its begin."""
        if self._is_closed or managed.index in self._used:
            return managed.load()[0]
        self._used.add(managed.index)
        with _Pause(self, Event("needed", managed.index, managed.bytes)) as at:
            if self.mode == "plan":
                self._settle(at)
            return self._load(managed)[0]

    def _load(self, managed: Managed) -> list[tuple[torch.UntypedStorage, int]]:
        begin = time.monotonic()
        places = managed.load()
        self._waited_s += time.monotonic() - begin
        return places

    # --- the optimizer's state -------------------------------------------------------------------

    def need_state(self, index: int) -> list[tuple[torch.UntypedStorage, int]]:
        """Return the storages of the state `index`; none before there is any."""
        managed = self.states.get(index)
        with _Pause(self, Event("state", index, 0)) as at:
            self._put_away_states()
            if self.mode == "plan":
                self._settle(at)
            return self._load(managed) if managed is not None else []

    def hand_back_state(self, index: int, tensors: list[torch.Tensor]) -> None:
        """Take the state after its update; it is put away at the next event."""
        sources = [own_bytes(tensor) for tensor in tensors]
        managed = self.states.get(index)
        sizes = [source.numel() for source in sources]
        if managed is None or managed.sizes != sizes:  # a first update that failed makes less of it
            managed = self.states[index] = Managed(self.file, index, sources)
        else:
            managed.replace(sources)
        self._updated = managed

    def forget_states(self) -> None:
        """Forget all state: the optimizer has it, or has been given another one."""
        self._updated = None
        self.states.clear()

    def put_state(self, index: int, tensors: list[torch.Tensor]) -> None:
        """Take state that the optimizer has, between two steps."""
        self.states.pop(index, None)
        self.hand_back_state(index, tensors)
        self._put_away_states()

    def _put_away_states(self) -> None:
        managed, self._updated = self._updated, None
        if managed is None:
            return
        if self.mode == "plan":
            place = self._places.get(("optimizer", managed.index))
            if place is not None:
                self._follow(place, managed)
        else:
            self._away(managed)

    # --- events ----------------------------------------------------------------------------------

    def arrive(self, event: Event) -> int:
        """Count an event; return its number in the step."""
        at = self._at
        self._at += 1
        if at == 0:
            self._begin_step()
        if self.mode == "record":
            self._recording.enter(event)
        elif self.mode == "plan" and (at >= len(self._order) or self._order[at] != event):
            self._diverge(f"event {at} is {_said(event)}, {self._expected(at)} before")
        return at

    def enter_module(self, name: str, inputs: list[torch.Tensor]) -> None:
        """Note that a module begins which may be recomputed."""
        if self.mode != "record" or not torch.is_grad_enabled():
            return
        runs = self._recording.modules
        if name in runs:
            runs[name].is_once = False
            return
        self._module = runs[name] = ModuleRun(self._at)
        self._inputs = {tensor.untyped_storage()._cdata for tensor in inputs}  # noqa: SLF001  # as in `save`

    def leave_module(self, *, is_changed: bool) -> None:
        """Note that it ended, and whether it changed its buffers."""
        if self._module is not None:
            self._module.end = self._at
            self._module.is_once = self._module.is_once and not is_changed
            self._module = None

    def leave(self) -> None:
        """Go on with the step after an event."""
        if self.mode == "record":
            self._recording.leave()
        else:
            self._hold_budget()

    def _hold_budget(self) -> None:
        """Give freed memory back where the coming interval would not fit beside it."""
        at = self._at - 1
        growth = self._growth[at] if at < len(self._growth) else 0
        if self.memory.now_bytes() + growth > self.budget_bytes:
            self.file.buffers.clear()
            self.allocator.trim()
            self.counters.trims += 1

    def end_step(self) -> None:
        """End a step: the optimizer is done."""
        with _Pause(self, Event("end", 0, 0)) as at:
            self._put_away_states()
            if self.mode == "plan":
                self._settle(at)
            if self.mode == "plan" and self._at != len(self._order):
                self._diverge(f"the step has {self._at} events, {len(self._order)} before")
        self._note_step()
        if self.mode == "record":
            self._end_recorded()
        elif self.mode == "diverged":
            self._end_diverged()
        else:
            self._diverged_in_a_row = 0
        self._at = self._saved = 0
        self._current = {
            place: self._current[place]
            for (kind, _), place in self._places.items()
            if kind == "optimizer" and place in self._current
        }
        self._by_storage.clear()
        self._used.clear()

    def _begin_step(self) -> None:
        if self.mode == "record" and self._before is not None:
            # The interval from the step before to this one, which belongs to both.
            recording = self._recording
            recording.close_interval()
            if recording.peak_bytes:
                self._after_step = (recording.compute_s[-1], recording.peak_bytes[-1])
            recording.forget()
            self._recording = Recording(self.memory)

    def _expected(self, at: int) -> str:
        return _said(self._order[at]) if at < len(self._order) else "the step was over"

    def _follow(self, place: int, managed: Managed) -> None:
        """Begin what the plan has for a tensor that is there."""
        assert self.plan is not None
        self._current[place] = weakref.ref(managed)
        if self.plan.actions[place].action == "spill":
            managed.spill()

    def _settle(self, at: int) -> None:
        """Await the writes and start the reads that the plan has at an event."""
        begin = None
        for place in self._due.get(at, ()):
            managed = self._find(place)
            if managed is not None:
                begin = begin or time.monotonic()
                managed.wait_written()
        if begin is not None:
            self._waited_s += time.monotonic() - begin
        for place in self._starts.get(at, ()):
            managed = self._find(place)
            if managed is not None:
                managed.start_reading()

    def _find(self, place: int) -> Managed | None:
        found = self._current.get(place)
        return found() if found is not None else None

    def _away(self, managed: Managed) -> None:
        managed.spill()
        managed.wait_written()

    # --- recording, planning ---------------------------------------------------------------------

    def _end_recorded(self) -> None:
        recording = self._recording
        self._recorded += 1
        if self._before != recording.events:
            self._before = recording.events
            if self._recorded >= RECORDED_STEPS:
                self.mode = "unplanned"
                self.say(
                    f"no two of {self._recorded} steps had the same order: all is written at once "
                    "and read when it is needed, which is slow"
                )
            return
        recording.forget()
        self.make_plan(recording)
        self._before = None
        self._recorded = 0

    def make_plan(self, recording: Recording) -> None:
        """Plan the steps that follow after a recorded one.

        Raises:
            MemoryExceeded: no plan holds the budget.
        """
        sizes = {index: managed.bytes for index, managed in self.states.items()}
        profile, places = profile_of(recording, sizes, self._after_step)
        if self.recompute is None or self._first_plan is not None:
            profile = replace(profile, modules=())
        target = target_budget_bytes(profile, self.budget_bytes)
        try:
            plan = plan_memory(profile, self.tier(), target)
        except MemoryExceeded:
            if self._first_plan is None or self.recompute is None:
                raise
            self._end_recomputing(self.recompute)
            return
        if plan.recomputed:
            self._begin_recomputing(plan, profile)
            return
        self.profile, self._places = profile, places
        self.plan = plan = self._compared(plan)
        self._order = recording.events
        self._due, self._starts = {}, {}
        events = self.profile.events
        for place, action in enumerate(plan.actions):
            if action.action == "spill":
                self._due.setdefault(action.written_by % events, []).append(place)
                self._starts.setdefault(action.read_at, []).append(place)
        self.mode = "plan"
        pairs = zip(recording.peak_bytes, recording.begin_bytes, strict=False)
        slack = int(self.budget_bytes * SLACK_PART)
        self._growth = [int(GROWTH_MARGIN * (peak - begin)) + slack for peak, begin in pairs]
        self._growth.append(max(self._growth, default=slack))  # until the next step's first event
        self.allocator.give_back_on_trim()
        self.file.buffers.is_kept = True
        self._load_kept_states()
        self.say(_summary(plan, self.budget_bytes))

    def _begin_recomputing(self, plan: MemoryPlan, profile: StepProfile) -> None:
        """Have modules recomputed, and record the steps that come of it: they are others."""
        assert self.recompute is not None
        self.recompute(plan.recomputed)
        self._first_plan = plan
        self._recomputed_s = sum(
            module.compute_s for module in profile.modules if module.name in plan.recomputed
        )
        self.say(
            f"memory: {len(plan.recomputed)} modules are computed again in place of keeping what "
            f"they save ({', '.join(plan.recomputed)}); their steps are recorded"
        )
        self._recording = Recording(self.memory)

    def _end_recomputing(self, recompute: Callable[[tuple[str, ...]], None]) -> None:
        """Go without: what a module computes again does not fit after all."""
        recompute(())
        self.recompute = self._first_plan = None
        self.say("memory: a recomputed module needs too much at once; steps are recorded without")
        self._recording = Recording(self.memory)

    def _compared(self, plan: MemoryPlan) -> MemoryPlan:
        """Return a plan whose comparison is with a step that neither spills nor recomputes."""
        first = self._first_plan
        if first is None:
            return plan
        return replace(
            plan,
            recomputed=first.recomputed,
            in_core_peak_bytes=first.in_core_peak_bytes,
            in_core_step_s=max(plan.in_core_step_s - self._recomputed_s, 1e-9),
        )

    def _load_kept_states(self) -> None:
        """Bring the state back that stays from now on, and remember where all of it is."""
        assert self.plan is not None
        for (kind, index), place in self._places.items():
            if kind == "optimizer" and index in self.states:
                managed = self.states[index]
                self._current[place] = weakref.ref(managed)
                if self.plan.actions[place].action == "keep":
                    managed.load()

    def tier(self) -> SpillTier:
        """Return what the spill file has shown so far."""
        file = self.file
        moved = file.written_bytes + file.read_bytes
        return SpillTier(
            name=str(file.folder),
            write_bytes_per_s=file.written_bytes / file.write_s if file.write_s else 1e9,
            read_bytes_per_s=file.read_bytes / file.read_s if file.read_s else 1e9,
            cpu_s_per_byte=2 * file.cpu_s / moved if moved else 0.0,
            cores=torch.get_num_threads(),
        )

    # --- another order ---------------------------------------------------------------------------

    def _diverge(self, why: str) -> None:
        """Go on without a plan until the step ends: whatever is in memory and may go, goes."""
        self.mode = "diverged"
        self.counters.diverged += 1
        if self.counters.diverged == 1:
            self.say(
                f"a step took another order ({why}); all of its tensors are written at once and "
                "read when they are needed. Two such steps in a row are recorded again"
            )
        held = [managed for ref in self._current.values() if (managed := ref()) is not None]
        for managed in held:
            managed.spill()
        for managed in held:
            managed.wait_written()

    def _end_diverged(self) -> None:
        self._diverged_in_a_row += 1
        if self._diverged_in_a_row < DIVERGED_STEPS:
            self.mode = "plan"
            return
        self._diverged_in_a_row = 0
        self.mode = "record"
        self.allocator.give_back_at_once()
        self.file.buffers.is_kept = False
        self.file.buffers.clear()
        self.plan = None
        self._places, self._before, self._recorded = {}, None, 0
        self._recording = Recording(self.memory)

    def _note_step(self) -> None:
        now = time.monotonic()
        counters = self.counters
        if self.mode == "plan" and self._begin_s is not None:
            counters.steps += 1
            counters.exposed_s += self._waited_s
            counters.transfer_s += self._moved_s() - self._moved_before_s
        self._waited_s = 0.0
        self._moved_before_s = self._moved_s()
        self._begin_s = now

    def _moved_s(self) -> float:
        return self.file.write_s + self.file.read_s

    def to_json(self) -> dict[str, Any]:
        """Return what the steps under a plan came to, per step, and the plan in short."""
        counters, plan, file = self.counters, self.plan, self.file
        steps = max(counters.steps, 1)
        names = (
            "method", "peak_bytes", "in_core_peak_bytes", "step_s", "in_core_step_s", "slowdown",
            "exposed_s", "spilled_bytes", "recomputed",
        )  # fmt: skip
        return {
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "spill_folder": str(file.folder),
            "is_direct": file.is_direct,
            "planned_steps": counters.steps,
            "diverged_steps": counters.diverged,
            "transfer_s": counters.transfer_s / steps,
            "exposed_s": counters.exposed_s / steps,
            "trims": counters.trims / steps,
            "write_bytes_per_s": file.written_bytes / file.write_s if file.write_s else None,
            "read_bytes_per_s": file.read_bytes / file.read_s if file.read_s else None,
            "plan": None if plan is None else {name: getattr(plan, name) for name in names},
        }

    def planned_step(self) -> dict[str, Any] | None:
        """Return what a report replays a step from: the recorded step, its plan and the tier."""
        if self.plan is None or self.profile is None:
            return None
        parts = {"profile": self.profile, "plan": self.plan, "tier": self.tier()}
        return {name: record.to_json() for name, record in parts.items()}

    def close(self) -> None:
        """End the I/O threads and free the spill file; saved tensors cannot be read any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._recording.forget()
        self.forget_states()
        self.file.close()
        self.memory.close()
        self.allocator.give_back_at_once()  # what was kept for the next step


class _Pause:
    """Between its begin and end the step stands still."""

    __slots__ = ("_event", "_session")

    def __init__(self, session: Session, event: Event) -> None:
        self._session = session
        self._event = event

    def __enter__(self) -> int:
        return self._session.arrive(self._event)

    def __exit__(self, *_: object) -> None:
        self._session.leave()


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, which stays in memory in any case."""
    return any(isinstance(found, torch.nn.Parameter) for found in (tensor, tensor._base))  # noqa: SLF001  # no public name


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is what its memory says: on CPU, strided, of no subclass."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_conj() or tensor.is_neg())  # bits of the tensor, not of its memory
    )


def _named(tensor: torch.Tensor) -> str:
    node = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "saved tensor"
    return f"{node} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _said(event: Event) -> str:
    if event.kind == "saved":
        return f"a saved tensor of {event.bytes:,} bytes"
    return {"needed": "a use of a saved tensor", "state": "an update", "end": "the end"}[event.kind]


def _summary(plan: MemoryPlan, budget_bytes: int) -> str:
    mib = 1 << 20
    if plan.method == "fits":
        return (
            f"memory: all fits the budget of {budget_bytes / mib:,.0f} MiB "
            f"(predicted peak {plan.peak_bytes / mib:,.0f} MiB); nothing is spilled"
        )
    return (
        f"memory: {plan.spilled_bytes / mib:,.0f} MiB a step go to disk and back, predicted peak "
        f"{plan.peak_bytes / mib:,.0f} MiB of {budget_bytes / mib:,.0f} MiB "
        f"(in core {plan.in_core_peak_bytes / mib:,.0f} MiB), predicted step "
        f"{plan.slowdown:.2f} times as long"
    )
