"""Captures the order of a step's events, and the memory between them, without running the step.

The model is copied with fake tensors (shapes without data), and two steps run on the copy. As in a
recorded step (`session`), every tensor that may be away is away until it is needed, so that each
interval shows the least memory that it can do with. Memory is the storages that are alive after
each operator.

Limits: memory that operators use within themselves is not seen, nor are holes between tensors.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import UsageError
from paceline.schedules.memory import StepEvents
from paceline.training.capture import (
    TrainingStep,
    call_arguments,
    fake_copy,
    fake_values,
    loss_in,
    operations_of,
)
from paceline.training.operators import tensors_in, works_of
from paceline.training.out_of_core.process_memory import ProcessMemory
from paceline.training.out_of_core.recompute import candidates, watch_modules
from paceline.training.out_of_core.recording import END, AfterStep, Event, Recording
from paceline.training.out_of_core.step_order import (
    Movable,
    SavedOrder,
    identity,
    raw_step,
    update_one_by_one,
)
from paceline.training.out_of_core.step_profile import profile_of
from paceline.training.out_of_core.training import OutOfCore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.machine import Phase


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Saved:
    """A tensor that autograd saved, away until it is needed."""

    index: int
    bytes: int
    loaded: torch.Tensor | None = None


@dataclass(slots=True)
class _LiveMemory:
    """The bytes of the storages that are alive, in place of a process's memory."""

    storages: dict[int, tuple[int, int]] = field(default_factory=dict)  # weak reference, bytes
    gone: list[int] = field(default_factory=list)  # held, so that no other storage gets their key
    away: set[int] = field(default_factory=set)
    peak: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), identity(tensor)
        if key not in self.storages:
            self.storages[key] = (storage._weak_ref(), storage.nbytes())  # noqa: SLF001  # as in `recording`

    def note(self) -> None:
        self.peak = max(self.peak, self.now_bytes())

    def now_bytes(self) -> int:
        total = 0
        for key, (weak, size) in list(self.storages.items()):
            if torch.UntypedStorage._expired(weak):  # noqa: SLF001  # as above
                self.gone.append(weak)
                del self.storages[key]
            elif key not in self.away:
                total += size
        return total

    def start(self) -> None:
        self.peak = self.now_bytes()

    def settle(self) -> None:
        """Do nothing: no operator runs."""

    def peak_bytes(self) -> int:
        return self.peak

    def close(self) -> None:
        for weak in [*self.gone, *(weak for weak, _ in self.storages.values())]:
            torch.UntypedStorage._free_weak_ref(weak)  # noqa: SLF001  # as above
        self.storages.clear()
        self.gone.clear()


def capture_events(step: TrainingStep) -> StepEvents:
    """Return the events of a training step, the memory between them and the work.

    Args:
        step: the model and its batch; with an optimizer.

    Raises:
        UsageError: there is no optimizer, or the step cannot be captured.
    """
    if step.optimizer is None:
        raise UsageError(
            "a step out of core ends with the optimizer's update",
            where=type(step.module).__name__,
            fix="Let the function return the optimizer, a function of the parameters, too",
        )
    process_bytes = bytes_beside(step)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        module = fake_copy(step.module, fake)
        inputs, target = fake_values(step.inputs, fake), fake_values(step.target, fake)
        with fake:
            capture = EventCapture(module, [*tensors_in(inputs), *tensors_in(target)])
            with capture.watching():
                capture.run(step, inputs, target)
    except UsageError:
        raise
    except Exception as problem:
        raise UsageError(
            "the memory of a step cannot be captured",
            where=type(step.module).__name__,
            why=f"{type(problem).__name__}: {problem}",
            fix="Check that a training step runs, and that no layer branches on tensor values",
        ) from problem
    return capture.found(process_bytes)


def bytes_beside(step: TrainingStep) -> int:
    """Return what this process has beside the model: the interpreter, torch, a session."""
    assert step.optimizer is not None
    own = [*step.module.parameters(), *step.module.buffers(), *tensors_in(step.inputs)]
    _warm_up(step.optimizer)
    process = ProcessMemory()
    process_bytes: int = process.now_bytes() - sum(tensor.nbytes for tensor in own)
    process.close()
    return max(0, process_bytes)


def _warm_up(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Train a small model out of core: the process then has what torch and a session load."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    optimizer = make_optimizer(layers.parameters())
    with tempfile.TemporaryDirectory() as folder:
        session = OutOfCore(layers, optimizer, budget_bytes=1 << 50, spill_folder=folder)
        with session:
            for _ in range(3):
                optimizer.zero_grad()
                layers(torch.ones(256, 256)).sum().backward()
                optimizer.step()


class EventCapture(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for us
    """Runs the steps, and counts what is alive after each operator."""

    def __init__(self, module: torch.nn.Module, batch: list[torch.Tensor]) -> None:
        super().__init__()
        self._module = module
        self._memory = _LiveMemory()
        self._recording = Recording(self._memory)
        self._work: list[Counter[tuple[Any, ...]]] = []
        self._phase: Phase | None = None
        self._is_recorded = self._is_over = False
        self._movable = Movable(types=(FakeTensor,))
        self._order: SavedOrder[_Saved] = SavedOrder(self._movable)
        self._state_bytes: dict[int, int] = {}
        for tensor in [*module.parameters(), *module.buffers(), *batch]:
            self._memory.add(tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch saved tensors, operators and the modules that may be computed again."""
        hooks = watch_modules(candidates(self._module), self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, self._need), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def run(self, step: TrainingStep, inputs: Any, target: Any) -> None:
        """Run a step that makes the optimizer's state, one that counts, and the next forward."""
        assert step.optimizer is not None
        optimizer = step.optimizer(self._module.parameters())
        for number in range(3):
            self._is_recorded = number > 0
            self._order.begin_step()
            self._phase = "optimizer"
            optimizer.zero_grad()
            self._phase = "forward"
            loss = self._loss(step, inputs, target)
            if number == 2:
                break
            self._phase = "backward"
            loss.backward()
            self._phase = "optimizer"
            self._update(optimizer)
            self._event(END)
            self._is_over = self._is_recorded
            del loss

    def found(self, process_bytes: int) -> StepEvents:
        """Return what the step showed."""
        recording = self._recording
        profile, _ = profile_of(
            recording,
            self._state_bytes,
            AfterStep(peak_bytes=recording.peak_bytes[len(recording.events) - 1]),
            fault_s=0.0,
        )
        recording.forget()
        self._memory.close()
        parameters = list(self._module.parameters())
        runs = [recording.modules[module.name] for module in profile.modules]
        return StepEvents(
            profile=profile,
            work=tuple(operations_of(counts) for counts in self._work),
            modules=tuple((max(run.begin - 1, 0), run.end or 0) for run in runs),
            process_bytes=process_bytes,
            parameter_bytes=sum(p.nbytes for p in parameters),
            gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        )

    def _loss(self, step: TrainingStep, inputs: Any, target: Any) -> torch.Tensor:
        arguments, keywords = call_arguments(self._module, inputs)
        output = self._module(*arguments, **keywords)
        if step.loss_fn is None:
            loss = loss_in(output)
        else:
            loss = step.loss_fn(output) if target is None else step.loss_fn(output, target)
        return cast("torch.Tensor", loss)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update each large parameter alone, then the others, as `OptimizerFiles` does."""
        groups = optimizer.param_groups
        members = [group["params"] for group in groups]
        if raw_step(optimizer) is not None:

            def update(index: int, parameter: Any) -> None:
                self._update_alone(optimizer, index, parameter)

            update_one_by_one(groups, self._movable.is_large, update)
        optimizer.step()
        for group, parameters in zip(groups, members, strict=True):
            group["params"] = parameters

    def _update_alone(self, optimizer: torch.optim.Optimizer, index: int, parameter: Any) -> None:
        self._event(Event("state", index, 0))
        self._memory.away -= self._storages_of(optimizer, parameter)
        self._memory.note()
        optimizer.step()
        large = self._movable.large_of(optimizer.state[parameter])
        self._state_bytes[index] = sum(tensor.nbytes for tensor in large.values())
        self._memory.away |= self._storages_of(optimizer, parameter)

    def _storages_of(self, optimizer: torch.optim.Optimizer, parameter: Any) -> set[int]:
        large = self._movable.large_of(optimizer.state.get(parameter, {}))
        return {identity(tensor) for tensor in large.values()}

    # --- events ----------------------------------------------------------------------------------

    def _recorded(self) -> Recording | None:
        """Return what the step is recorded in; None in a step that does not count."""
        return self._recording if self._is_recorded and not self._is_over else None

    def _event(self, event: Event) -> None:
        if (recording := self._recorded()) is not None:
            recording.enter(event)
            self._work.append(Counter())
            recording.leave()
        elif self._is_recorded:  # the first event of the step after the recorded one
            self._recording.close_interval()
            self._is_recorded = False

    def enter_module(self, name: str, inputs: list[torch.Tensor]) -> None:
        """Note that a module begins which may be recomputed."""
        if (recording := self._recorded()) is not None:
            recording.enter_module(name, inputs)

    def leave_module(self, *, is_changed: bool) -> None:
        """Note that it ended, and whether it changed its buffers."""
        if (recording := self._recorded()) is not None:
            recording.leave_module(is_changed=is_changed)

    # --- saved tensors ---------------------------------------------------------------------------

    def _save(self, tensor: torch.Tensor) -> Any:
        size = tensor.untyped_storage().nbytes()
        saved, is_new = self._order.take(tensor, lambda index: _Saved(index, size))
        if saved is None:
            return tensor.detach()
        if is_new:
            self._event(Event("saved", saved.index, size))
            if (recording := self._recorded()) is not None:
                recording.note_saved(saved.index, tensor)
        return saved, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    def _need(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        saved, dtype, shape, stride, offset = packed
        if self._order.is_first_use(saved.index):
            self._event(Event("needed", saved.index, saved.bytes))
        if saved.loaded is None:
            saved.loaded = torch.empty(saved.bytes, dtype=torch.uint8)
            self._memory.add(saved.loaded)
            self._memory.note()
        phase, self._phase = self._phase, None
        try:
            return saved.loaded.view(dtype).as_strided(shape, stride, offset)
        finally:
            self._phase = phase

    # --- operators -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_recorded and self._work:
            return result
        made = tensors_in(result)
        for tensor in made:
            self._memory.add(tensor)
        self._memory.note()
        if self._work and self._phase is not None:
            dtype = str(made[0].dtype if made else torch.float32).removeprefix("torch.")
            for work in works_of(func, args, kwargs, result):
                key = (self._phase, work.operator, dtype, work.flops, work.bytes, work.name)
                self._work[-1][key] += work.count
        return result
