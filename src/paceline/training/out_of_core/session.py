"""Runs training steps under a memory budget: records two, has a plan made, and carries it out.

    record -> record again -> plan
      ^                        |  another order: the rest of the step as when it is recorded
      +--- twice in a row -----+

Every event of a step (`recording.Event`) passes through `arrive`. Under a plan it compares the
event with the recorded one, starts and awaits the transfers that the plan has there, and so holds
the budget by order, not by time. Where the order differs, everything is written at once and read
when it is needed, which is always right, and slow.

Which tensors count is `step_order`'s; what a recorded step showed `recording`'s; `planning` makes
the plan, `following` has its transfers, `counting` what they came to.

On CPU all of it runs in the step's thread: autograd runs a backward pass in the thread that calls
it. Only `Managed._forget_source` runs in the writer's. On a GPU autograd has a thread of its own,
for which the step's thread waits.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from paceline.schedules.memory import SLACK_PART, load_solver
from paceline.training.out_of_core.counting import Counters, StepMeter, plan_json, summary
from paceline.training.out_of_core.managed import Managed, own_bytes, storage_bytes
from paceline.training.out_of_core.planning import Planner
from paceline.training.out_of_core.recording import END, Event, OrderRecorder
from paceline.training.out_of_core.step_order import Movable, SavedOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.schedules.memory import MemoryPlan, StepProfile
    from paceline.training.out_of_core.following import Following
    from paceline.training.out_of_core.places import Place
    from paceline.training.out_of_core.spill_target import Moved

DIVERGED_STEPS = 2  # in a row, after which the order is recorded again
LATE_STEPS = 3  # in a row for a slow disk, after which steps are recorded with it as it is now
RECORDED_STEPS = 12  # without two of the same order: planning is given up
# DistributedDataParallel makes its buckets anew in the second forward pass; they take pages with
# the gradients after that. So only the third step has all of their memory from its beginning.
RECORDED_ON_RANKS = 3

Mode = Literal["record", "plan", "diverged", "unplanned"]


class Session:
    """The steps of one training in this process.

    Args:
        budget_bytes: that the memory of the place stays under; of a process without pages of files.
        place: where it trains, and where tensors go.
        say: is called with each line for the user.

    Attributes:
        movable: which tensors may be away.
        states: of the optimizer, by index.
        planning: makes the plan.
    """

    def __init__(self, budget_bytes: int, place: Place, say: Callable[[str], None]) -> None:
        self.budget_bytes = budget_bytes
        load_solver()
        device, self.target, self.memory, self.allocator = place
        self.allocator.begin()
        if not self.allocator.is_pooled:
            say("memory: torch's allocations cannot be pooled; page faults will make steps slower")
        self.movable = Movable(device=device)
        self.planning = Planner(self.target, say)
        self.counters = Counters()
        self.mode: Mode = "record"
        self.states: dict[int, Managed] = {}
        self.say = say
        self._recorder = OrderRecorder(self.memory, _least_steps())
        self._meter = StepMeter(self.target, self.counters)
        self._order: SavedOrder[Managed] = SavedOrder(self.movable)
        self._following: Following | None = None
        self._last: Following | None = None  # the plan in use, or before steps are recorded again
        self._at = 0
        self._diverged_in_a_row = 0
        self._late_steps = LATE_STEPS  # doubled with each correction: a disk may be of all speeds
        self._pid = os.getpid()
        self._is_closed = False
        self._updated: Managed | None = None

    @property
    def plan(self) -> MemoryPlan | None:
        """The plan in use; None while steps are recorded."""
        return self._following.plan if self._following is not None else None

    @property
    def profile(self) -> StepProfile | None:
        """What the last plan was made of; None before there is one."""
        return self._last.profile if self._last is not None else None

    # --- saved tensors ---------------------------------------------------------------------------

    def save(self, tensor: torch.Tensor) -> Managed | None:
        """Take a tensor that is saved for the backward pass; None if it stays as it is."""
        if os.getpid() != self._pid:  # a forked process has no threads
            return None

        def make(index: int) -> Managed:
            return Managed(self.target, index, [storage_bytes(tensor)], tensor.detach())

        managed, is_new = self._order.take(tensor, make)
        if managed is None or not is_new:
            return managed
        with _Pause(self, Event("saved", managed.index, managed.bytes)) as at:
            if (plan := self._planned()) is not None:
                plan.take("activation", managed)
                plan.settle(at)
            else:
                if self.mode == "record":
                    self._recorder.step.note_saved(managed.index, tensor)
                self._away(managed)
        return managed

    def need(self, managed: Managed) -> tuple[torch.UntypedStorage, int]:
        """Return the storage of a saved tensor, and the bytes before its begin."""
        if self._is_closed or not self._order.is_first_use(managed.index):
            return managed.load()[0]
        with _Pause(self, Event("needed", managed.index, managed.bytes)) as at:
            if (plan := self._planned()) is not None:
                plan.settle(at)
            return managed.load()[0]

    # --- the optimizer's state -------------------------------------------------------------------

    def need_state(self, index: int) -> list[tuple[torch.UntypedStorage, int]]:
        """Return the storages of the state `index`; none before there is any."""
        managed = self.states.get(index)
        with _Pause(self, Event("state", index, 0)) as at:
            self._put_away_states()
            if (plan := self._planned()) is not None:
                plan.settle(at)
            return managed.load() if managed is not None else []

    def hand_back_state(self, index: int, tensors: list[torch.Tensor]) -> None:
        """Take the state after its update; it is put away at the next event."""
        sources = [own_bytes(tensor) for tensor in tensors]
        managed = self.states.get(index)
        sizes = [source.numel() for source in sources]
        if managed is None or managed.sizes != sizes:  # a first update that failed makes less of it
            managed = self.states[index] = Managed(self.target, index, sources)
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
        if at == 0 and self.mode == "record":
            self._recorder.begin_step()
        if self.mode == "record":
            self._recorder.step.enter(event)
            self.allocator.end_interval(self.memory.peak_bytes)
        elif (plan := self._planned()) is not None and (expected := plan.expected(at)) != event:
            self._diverge(plan, f"event {at} is {_said(event)}, {_said(expected)} before")
        return at

    def leave(self) -> None:
        """Go on with the step after an event."""
        if self.mode == "record":
            self.allocator.begin_interval(self.memory.now_bytes)
            self._recorder.step.leave()
        else:
            self._hold_budget()

    def enter_module(self, name: str, inputs: list[torch.Tensor]) -> None:
        """Note that a module begins which may be recomputed."""
        if self.mode == "record" and torch.is_grad_enabled():
            self._recorder.step.enter_module(name, inputs)

    def leave_module(self, *, is_changed: bool) -> None:
        """Note that it ended, and whether it changed its buffers."""
        if self.mode == "record":
            self._recorder.step.leave_module(is_changed=is_changed)

    def _hold_budget(self) -> None:
        """Keep as much freed memory as the budget leaves beside all else of the process."""
        slack = int(self.budget_bytes * SLACK_PART) // 2
        self.allocator.keep_within(self.budget_bytes - slack, self.memory.now_bytes)

    def end_step(self) -> None:
        """End a step: the optimizer is done."""
        with _Pause(self, END) as at:
            self._put_away_states()
            if (plan := self._planned()) is not None:
                plan.settle(at)
        used_bytes = self.allocator.end_step()
        moved = self._meter.end_step(used_bytes, is_planned=self.mode == "plan")
        if self.mode == "record":
            self._end_recorded()
        elif self.mode == "diverged":
            self._end_diverged()
        elif (plan := self._planned()) is not None:
            self._diverged_in_a_row = 0
            plan.judge(moved)
            if plan.late_steps >= self._late_steps:
                self._correct(plan, moved)
        self._at = 0
        self._order.begin_step()
        if self._following is not None:
            self._following.end_step()

    def _planned(self) -> Following | None:
        """Return the plan that this step follows so far, if it does."""
        return self._following if self.mode == "plan" else None

    def _away(self, managed: Managed) -> None:
        managed.spill()
        managed.wait_written()

    # --- recording, planning ---------------------------------------------------------------------

    def _end_recorded(self) -> None:
        if self._recorder.end_step():
            self._make_plan()
        elif self._recorder.steps >= RECORDED_STEPS:
            self.mode = "unplanned"
            self.say(
                f"no two of {self._recorder.steps} steps had the same order: all is written at "
                "once and read when it is needed, which is slow"
            )

    def _make_plan(self) -> None:
        sizes = {index: managed.bytes for index, managed in self.states.items()}
        # A planned step keeps freed memory, where a recorded one takes it from the system again.
        fault_s = self.allocator.page_fault_s() / torch.get_num_threads()
        plan = self.planning.plan(self._recorder, sizes, self.budget_bytes, fault_s)
        self._recorder = OrderRecorder(self.memory)
        if plan is None:
            return
        self._following = self._last = plan
        plan.load_kept(self.states)
        self.mode = "plan"
        self.say(summary(plan.plan, self.budget_bytes, self.target.name))

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
        self.planning.begin()
        self._diverged_in_a_row = 0
        self.mode = "record"
        self.allocator.keep_nothing()
        self._following = None
        self._recorder = OrderRecorder(self.memory)

    def _correct(self, plan: Following, moved: Moved) -> None:
        """Have steps recorded and planned again with the disk as it is now."""
        self.counters.corrected += 1
        self._late_steps *= 2
        now = [moved.write_bytes_per_s or 0.0, moved.read_bytes_per_s or 0.0]
        planned = [plan.tier.write_bytes_per_s, plan.tier.read_bytes_per_s]
        self.say(
            f"memory: {self.target.place} writes {now[0] / 1e6:,.0f} and reads "
            f"{now[1] / 1e6:,.0f} MB/s, planned were {planned[0] / 1e6:,.0f} and "
            f"{planned[1] / 1e6:,.0f}; steps are recorded and planned again"
        )
        self._record_again()

    # --- what it came to -------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return what the steps under a plan came to, per step, and the plan in short."""
        last, done = self._last, self.target.moved()
        return {
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.plan and self.plan.peak_bytes,
            **self.target.to_json(),
            **self.counters.to_json(),
            "planned_write_bytes_per_s": last and last.tier.write_bytes_per_s,
            "planned_read_bytes_per_s": last and last.tier.read_bytes_per_s,
            "write_bytes_per_s": done.write_bytes_per_s,
            "read_bytes_per_s": done.read_bytes_per_s,
            "plan": None if last is None else plan_json(last.plan),
        }

    def planned_step(self) -> dict[str, Any] | None:
        """Return what a report replays a step from: the recorded step, its plan and the tier."""
        if self._last is None:
            return None
        parts = {"profile": self._last.profile, "plan": self._last.plan, "tier": self._last.tier}
        return {name: record.to_json() for name, record in parts.items()}

    def close(self) -> None:
        """End the transfers and free what is away; saved tensors cannot be read any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._recorder.forget()
        self.forget_states()
        self.target.close()
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


def _least_steps() -> int:
    """Return the steps to record before the first plan."""
    is_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return RECORDED_ON_RANKS if is_group else 2


def _said(event: Event | None) -> str:
    if event is None:
        return "the step was over"
    if event.kind == "saved":
        return f"a saved tensor of {event.bytes:,} bytes"
    return {"needed": "a use of a saved tensor", "state": "an update", "end": "the end"}[event.kind]
