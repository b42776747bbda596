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
from paceline.schedules.memory import (
    SLACK_PART,
    SpillTier,
    load_solver,
    plan_memory,
    target_budget_bytes,
)
from paceline.training.out_of_core.following import Following, Moved
from paceline.training.out_of_core.managed import Managed, own_bytes, storage_bytes, version_of
from paceline.training.out_of_core.process_memory import Allocator, ProcessMemory, page_faults
from paceline.training.out_of_core.recording import (
    AfterStep,
    Event,
    ModuleRun,
    Recording,
    profile_of,
)
from paceline.training.out_of_core.spill_file import SpillFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.schedules.memory import MemoryPlan, StepProfile

LEAST_BYTES = 1 << 16  # smaller tensors stay: a transfer would cost more than they free
VIEW_PART = 8  # a view of less than this part of its storage belongs to a larger thing, a data set
DIVERGED_STEPS = 2  # in a row, after which the order is recorded again
LATE_STEPS = 3  # in a row for a slow disk, after which steps are recorded with it as it is now
UNKNOWN_BYTES_PER_S = 1e9  # of a disk that nothing was written to
RECORDED_STEPS = 12  # without two of the same order: planning is given up

Mode = Literal["record", "plan", "diverged", "unplanned"]


@dataclass(slots=True)
class Counters:
    """What the steps under a plan came to; times in seconds."""

    steps: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    diverged: int = 0
    page_faults: int = 0
    corrected: int = 0


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
        self.allocator.begin()
        if not self.allocator.is_pooled:
            say("memory: torch's allocations cannot be pooled; page faults will make steps slower")
        self.profile: StepProfile | None = None
        self.counters = Counters()
        self.mode: Mode = "record"
        self.states: dict[int, Managed] = {}
        self.say = say
        self._recording = Recording(self.memory)
        self._before: list[Event] | None = None  # the order of the recorded step before this one
        self._after_step = AfterStep()
        self._recorded = 0
        self._following: Following | None = None
        self._last: Following | None = None  # the plan in use, or before steps are recorded again
        self._at = 0
        self._saved = 0
        self._by_storage: dict[tuple[int, int | None], weakref.ref[Managed]] = {}
        self._used: set[int] = set()  # saved tensors that were needed in this step
        self._diverged_in_a_row = 0
        self._begin_s: float | None = None
        self._waited_s = 0.0
        self._moved_before = self._moved_recorded = Moved()  # before this step, these recorded ones
        self._late_steps = LATE_STEPS  # doubled with each correction: a disk may be of all speeds
        self._faults_before = 0
        self.recompute: Callable[[tuple[str, ...]], None] | None = None  # these modules, or none
        self._first_plan: MemoryPlan | None = None  # which chose the modules that are recomputed
        self._recomputed_s = 0.0
        self._module: ModuleRun | None = None  # that runs and is recorded
        self._inputs: set[int] = set()
        self._pid = os.getpid()
        self._is_closed = False
        self._updated: Managed | None = None

    @property
    def plan(self) -> MemoryPlan | None:
        """The plan in use; None while steps are recorded."""
        return self._following.plan if self._following is not None else None

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
            if (plan := self._planned()) is not None:
                plan.take("activation", managed)
                self._waited_s += plan.settle(at)
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
            if (plan := self._planned()) is not None:
                self._waited_s += plan.settle(at)
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
            if (plan := self._planned()) is not None:
                self._waited_s += plan.settle(at)
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
        if (plan := self._planned()) is not None:
            plan.take("optimizer", managed)
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
        elif (plan := self._planned()) is not None and (expected := plan.expected(at)) != event:
            self._diverge(plan, f"event {at} is {_said(event)}, {_said(expected)} before")
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
        """Keep as much freed memory as the budget leaves beside all else of the process."""
        slack = int(self.budget_bytes * SLACK_PART) // 2
        self.allocator.keep_within(self.budget_bytes - slack, self.memory.now_bytes())

    def end_step(self) -> None:
        """End a step: the optimizer is done."""
        with _Pause(self, Event("end", 0, 0)) as at:
            self._put_away_states()
            if (plan := self._planned()) is not None:
                self._waited_s += plan.settle(at)
            if (plan := self._planned()) is not None and self._at != plan.events:
                self._diverge(plan, f"the step has {self._at} events, {plan.events} before")
        waited_s = self._waited_s
        moved = self._note_step()
        if self.mode == "record":
            self._end_recorded()
        elif self.mode == "diverged":
            self._end_diverged()
        elif (plan := self._planned()) is not None:
            self._diverged_in_a_row = 0
            plan.judge(moved, waited_s)
            if plan.late_steps >= self._late_steps:
                self._correct(plan, moved)
        self._at = self._saved = 0
        if self._following is not None:
            self._following.end_step()
        self._by_storage.clear()
        self._used.clear()

    def _begin_step(self) -> None:
        if self.mode == "record" and self._before is not None:
            # The interval from the step before to this one, which belongs to both.
            recording = self._recording
            recording.close_interval()
            self._after_step = recording.after_step()
            recording.forget()
            self._recording = Recording(self.memory)

    def _planned(self) -> Following | None:
        """Return the plan that this step follows so far, if it does."""
        return self._following if self.mode == "plan" else None

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
        # A planned step keeps freed memory, where a recorded one takes it from the system again.
        fault_s = self.allocator.page_fault_s() / torch.get_num_threads()
        profile, places = profile_of(recording, sizes, self._after_step, fault_s)
        if self.recompute is None or self._first_plan is not None:
            profile = replace(profile, modules=())
        target = target_budget_bytes(profile, self.budget_bytes)
        try:
            tier = self.tier()
            plan = plan_memory(profile, tier, target)
        except MemoryExceeded:
            if self._first_plan is None or self.recompute is None:
                raise
            self._end_recomputing(self.recompute)
            return
        if plan.recomputed:
            self._begin_recomputing(plan, profile)
            return
        self.profile = profile
        plan = self._compared(plan)
        self._following = self._last = Following(plan, profile, places, recording.events, tier)
        self._following.load_kept(self.states)
        self.mode = "plan"
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

    def tier(self) -> SpillTier:
        """Return what the spill file has shown since steps are recorded."""
        done = Moved.by(self.file).since(self._moved_recorded)
        moved = done.written_bytes + done.read_bytes
        return SpillTier(
            name=str(self.file.folder),
            write_bytes_per_s=done.write_bytes_per_s or UNKNOWN_BYTES_PER_S,
            read_bytes_per_s=done.read_bytes_per_s or UNKNOWN_BYTES_PER_S,
            cpu_s_per_byte=2 * done.cpu_s / moved if moved else 0.0,
            cores=torch.get_num_threads(),
        )

    # --- another order ---------------------------------------------------------------------------

    def _diverge(self, plan: Following, why: str) -> None:
        """Go on without a plan until the step ends: whatever is in memory and may go, goes."""
        self.mode = "diverged"
        self.counters.diverged += 1
        if self.counters.diverged == 1:
            self.say(
                f"a step took another order ({why}); all of its tensors are written at once and "
                "read when they are needed. Two such steps in a row are recorded again"
            )
        held = plan.held()
        for managed in held:
            managed.spill()
        for managed in held:
            managed.wait_written()

    def _end_diverged(self) -> None:
        self._diverged_in_a_row += 1
        if self._diverged_in_a_row < DIVERGED_STEPS:
            self.mode = "plan"
            return
        self._record_again()

    def _record_again(self) -> None:
        """Put all away that can be, and record the steps that follow."""
        for managed in self.states.values():
            self._away(managed)
            managed.drop()
        if self.recompute is not None and self._first_plan is not None:
            self.recompute(())  # the plan may choose others
            self._first_plan = None
        self._diverged_in_a_row = 0
        self._moved_recorded = Moved.by(self.file)
        self.mode = "record"
        self.allocator.keep_nothing()
        self._following, self._before, self._recorded = None, None, 0
        self._recording = Recording(self.memory)

    def _correct(self, plan: Following, moved: Moved) -> None:
        """Have steps recorded and planned again with the disk as it is now."""
        self.counters.corrected += 1
        self._late_steps *= 2
        now = [moved.write_bytes_per_s or 0.0, moved.read_bytes_per_s or 0.0]
        planned = [plan.tier.write_bytes_per_s, plan.tier.read_bytes_per_s]
        self.say(
            f"memory: the disk of {self.file.folder} writes {now[0] / 1e6:,.0f} and reads "
            f"{now[1] / 1e6:,.0f} MB/s, planned were {planned[0] / 1e6:,.0f} and "
            f"{planned[1] / 1e6:,.0f}; steps are recorded and planned again"
        )
        self._record_again()

    def _note_step(self) -> Moved:
        """Count a step; return what moved in it."""
        now = time.monotonic()
        done = Moved.by(self.file)
        moved = done.since(self._moved_before)
        counters = self.counters
        if self.mode == "plan" and self._begin_s is not None:
            counters.steps += 1
            counters.exposed_s += self._waited_s
            counters.transfer_s += moved.busy_s
            counters.page_faults += page_faults() - self._faults_before
        self._waited_s = 0.0
        self._moved_before = done
        self._faults_before = page_faults()
        self._begin_s = now
        return moved

    def to_json(self) -> dict[str, Any]:
        """Return what the steps under a plan came to, per step, and the plan in short."""
        counters, file = self.counters, self.file
        plan, tier = (self._last.plan, self._last.tier) if self._last is not None else (None, None)
        done = Moved.by(file)
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
            "corrected": counters.corrected,
            "diverged_steps": counters.diverged,
            "transfer_s": counters.transfer_s / steps,
            "exposed_s": counters.exposed_s / steps,
            "page_faults": counters.page_faults / steps,
            "planned_write_bytes_per_s": tier and tier.write_bytes_per_s,
            "planned_read_bytes_per_s": tier and tier.read_bytes_per_s,
            "write_bytes_per_s": done.write_bytes_per_s,
            "read_bytes_per_s": done.read_bytes_per_s,
            "plan": None if plan is None else {name: getattr(plan, name) for name in names},
        }

    def planned_step(self) -> dict[str, Any] | None:
        """Return what a report replays a step from: the recorded step, its plan and the tier."""
        if self._last is None or self.profile is None:
            return None
        parts = {"profile": self.profile, "plan": self._last.plan, "tier": self._last.tier}
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
        self.allocator.end()


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


def _said(event: Event | None) -> str:
    if event is None:
        return "the step was over"
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
