"""Sees the phases of a training loop where a script meets torch, by replacing callables.

A wrapper takes whatever its original takes and passes it on as it came, so that every legal call
stays legal. It opens a phase only if it is the outermost one on the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.numbers import ObjectNumbers
from paceline.trace.collectors.torch_hooks import RAISED, OpenPhase, RecordedKind, around
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.collectors.torch_layers import LayerRecorder, OpenLayer
from paceline.trace.format.events import (
    EVALUATION_MODE,
    IDLE,
    LOADER_SAMPLES,
    LOADER_STAGES,
    LOADER_WORKERS,
    LOSS,
    MAIN,
    NEXT,
    WITHOUT_GRADIENTS,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet
    from types import ModuleType

    from paceline.native import Recorder
    from paceline.trace.collectors.hook_registry import HookRegistry
    from paceline.trace.collectors.torch_hooks import Arguments, Keywords, Loop
    from paceline.trace.collectors.torch_in_flight import InFlight
    from paceline.trace.collectors.torch_loaders import LoaderRecorder
    from paceline.trace.collectors.torch_marks import StepMarks

_OPTIMIZER, _HOST = int(Kind.OPTIMIZER), int(Kind.HOST)
_FORWARD, _EVALUATION = int(Kind.FORWARD), int(Kind.EVALUATION)
_COMPILATION = int(Kind.COMPILATION)
# What belongs to the update of the parameters, beside an optimizer's step.
_UPDATES = (
    (torch.optim.Optimizer, "zero_grad", "zero_grad"),
    (torch.nn.Module, "zero_grad", "zero_grad"),
    (torch.amp.GradScaler, "unscale_", "unscale"),
    (torch.amp.GradScaler, "update", "update_scale"),
)
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_")


def _within_compilation(
    original: Callable[[], contextlib.AbstractContextManager[None]],
    kind: RecordedKind,
    begin: Callable[[], OpenPhase | None],
    end: Callable[[OpenPhase], None],
) -> Iterator[None]:
    state = kind.attempt(begin)
    try:
        with original():
            yield
    finally:
        if state is not None:
            kind.attempt(end, state)


# Dynamo counts what torch's own context manager executes, where a backward pass compiles.
internals.calls_the_script(_within_compilation)


class PhaseRecorder:
    """The side of the torch collector that sees phases; used by the main thread alone."""

    def __init__(
        self,
        recorder: Recorder,
        loop: Loop,
        in_flight: InFlight,
        marks: StepMarks,
        available: frozenset[Capability],
        hooks: HookRegistry,
        loader_times: LoaderRecorder,
    ) -> None:
        self.recorder = recorder
        self.loop = loop
        self.in_flight = in_flight
        self.marks = marks
        self.available = available
        self.hooks = hooks
        self.loader_times = loader_times
        self.modules = ObjectNumbers()
        self.loaders = ObjectNumbers()
        self.kinds: dict[Kind, RecordedKind] = {}
        # Where calls of modules pass: within a model, but while its layers are timed.
        passed_on = set(_part_of_phases(_FORWARD))
        self.layers = LayerRecorder(recorder, passed_on, available)
        self.passed_on = passed_on
        self.before_backward: list[Callable[[], None]] = []  # called before such a pass begins
        self.loss_begin_ns = 0  # end of the last training forward, when nothing came after it
        self.stepped_in_backward = False

    def install(self) -> None:
        """Put the hooks in place."""
        if Capability.LOADER_ITERATOR in self.available:
            self._wrap_next(internals.loader_iterator(), times=self.loader_times)
        self._wrap_iter(DataLoader, lambda loader: loader.num_workers, self.loader_times)
        for owner, attribute, label in _UPDATES:
            self.wrap(owner, attribute, Kind.OPTIMIZER, label)
        for attribute in _CLIPPING:
            if hasattr(torch.nn.utils, attribute):
                label = attribute.removesuffix("_")
                self.wrap(torch.nn.utils, attribute, Kind.OPTIMIZER, label)
        self.wrap(torch, "save", Kind.CHECKPOINT, "save", amount=_saved_bytes)
        self._wrap_forward()
        self._wrap_backward()
        for name in ("to", "cpu", "cuda", "copy_"):
            if hasattr(torch.Tensor, name):
                self._wrap_copy(name)

    def wrap_checkpoint(self, module: ModuleType) -> None:
        """See the checkpoints of `torch.distributed.checkpoint`."""
        for attribute in ("save", "async_save"):
            if hasattr(module, attribute):
                self.wrap(module, attribute, Kind.CHECKPOINT, f"checkpoint {attribute}")

    def wrap_compilation(self, module: ModuleType) -> None:
        """Record when Dynamo compiles: within a forward pass, or before a backward pass."""
        handler, kind = module.CompilationCallbackHandler, self.recorded(Kind.COMPILATION)
        original, name = handler.install_callbacks, self.recorder.intern("compile")

        def begin() -> OpenPhase | None:
            is_outermost = self.on_main_thread() and self.loop.phase != _COMPILATION
            return self._open(_COMPILATION) if is_outermost else None

        def end(state: OpenPhase) -> None:
            self.loop.phase = state.outer
            self.recorder.end(_COMPILATION, name, state.begin_ns, 0, state.outer)

        def installing(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
            return within(functools.partial(original, *args, **kwargs), kind, begin, end)

        within = contextlib.contextmanager(_within_compilation)
        self.hooks.replace(handler, "install_callbacks", installing)

    def wrap_loader(self, module: ModuleType) -> None:
        """Count waiting for the store's loader as input; counters say what it did for a batch."""
        iterator, recorder, counter = module.LoaderIterator, self.recorder, int(Kind.COUNTER)
        skipped_name, skipped = recorder.intern("loader_skipped_samples"), 0
        stages = [(f"{stage}_s", recorder.intern(name)) for stage, name in LOADER_STAGES.items()]
        samples_name = recorder.intern(LOADER_SAMPLES)

        def delivered(batches: Any) -> int:
            nonlocal skipped
            now_ns = monotonic_ns()
            if batches.skipped_count != skipped:
                skipped = batches.skipped_count
                recorder.record(counter, MAIN, skipped_name, now_ns, now_ns, skipped)
            tag, samples = self.loaders.number_of(batches), batches.delivered_samples
            if samples:
                recorder.record(counter, MAIN, samples_name, now_ns, now_ns, samples, tag=tag)
            for attribute, name in stages:
                spent_ns = int(1e9 * getattr(batches.delivered_stages, attribute))
                if spent_ns:
                    recorder.record(counter, MAIN, name, now_ns, now_ns, spent_ns, tag=tag)
            return int(batches.delivered_bytes)

        self._wrap_next(iterator, amount=delivered)
        self._wrap_iter(module.Loader, lambda loader: module.worker_count(loader.options))

    def on_main_thread(self) -> bool:
        """Return whether the loop's thread calls: the phases of others are not recorded."""
        return threading.get_ident() == self.loop.main_thread

    def wrap(
        self,
        owner: Any,
        attribute: str,
        kind: Kind,
        label: str,
        *,
        amount: Callable[..., int] | None = None,
    ) -> None:
        """Replace a callable by one that records its outermost calls on the main thread.

        Args:
            owner: class or module whose attribute it is.
            attribute: its name.
            kind: of event.
            label: name of the event.
            amount: from the call's arguments, the bytes that it moved.
        """
        recorder, number, name = self.recorder, int(kind), self.recorder.intern(label)

        def before(_args: Arguments, _kwargs: Keywords) -> OpenPhase | None:
            if not self.on_main_thread():
                return None
            if number != _HOST:  # a loss that the script logs is still the loss
                self.loss_begin_ns = 0
            return self._open(number)

        def after(state: OpenPhase, _result: Any, args: Arguments, kwargs: Keywords) -> None:
            self.loop.phase = state.outer
            size = amount(*args, **kwargs) if amount else 0
            recorder.end(number, name, state.begin_ns, size, state.outer)

        self._replace(owner, attribute, kind, before, after)

    def recorded(self, kind: Kind) -> RecordedKind:
        """Return the switch that all hooks of a phase share: whether it is still recorded."""
        if kind not in self.kinds:
            lost = f"the phase {kind.name.lower()} (its time counts as other)"
            self.kinds[kind] = RecordedKind(lost)
        return self.kinds[kind]

    def _open(self, number: int, tag: int = 0, flags: int = 0) -> OpenPhase:
        """Open a phase. Last in a hook: one that fails must leave none open."""
        begin_ns = self.recorder.begin(number)
        outer, self.loop.phase = self.loop.phase, number
        return OpenPhase(begin_ns, outer, number, tag, flags)

    def _wrap_iter(
        self,
        owner: type,
        worker_count: Callable[[Any], int],
        times: LoaderRecorder | None = None,
    ) -> None:
        """Record how long a loader takes to begin an epoch, and number it by its iterators.

        Args:
            owner: class of the loader.
            worker_count: returns how many processes or threads load ahead for a loader.
            times: sees what its workers do.
        """
        recorder, number, name = self.recorder, int(Kind.INPUT), self.recorder.intern("iter")
        workers_name = recorder.intern(LOADER_WORKERS)

        def before(args: Arguments, _kwargs: Keywords) -> OpenPhase | None:
            if not self.on_main_thread():
                return None
            self.loss_begin_ns = 0
            now_ns, workers = monotonic_ns(), worker_count(args[0])
            tag = self.loaders.number_of(args[0])
            recorder.record(int(Kind.COUNTER), MAIN, workers_name, now_ns, now_ns, workers, tag=tag)
            if times is not None:
                times.begins(tag)
            return self._open(number, tag)

        def after(state: OpenPhase, iterator: Any, args: Arguments, _kwargs: Keywords) -> None:
            self.loop.phase = state.outer
            if times is not None:
                times.has_begun()
            if iterator is not RAISED:
                self.loaders.number_of(iterator, same_as=args[0])
            recorder.end(number, name, state.begin_ns, 0, state.outer, state.tag)

        self._replace(owner, "__iter__", Kind.INPUT, before, after)

    def _wrap_next(
        self,
        owner: type,
        amount: Callable[..., int] | None = None,
        times: LoaderRecorder | None = None,
    ) -> None:
        """Record how long the loop waits for each batch, and where steps may end."""
        recorder, number, name = self.recorder, int(Kind.INPUT), self.recorder.intern(NEXT)

        def before(args: Arguments, _kwargs: Keywords) -> OpenPhase | None:
            if not self.on_main_thread():
                return None
            self.loss_begin_ns = 0
            if self.loop.phase == IDLE:
                self.marks.before_batch()
            tag = self.loaders.number_of(args[0])
            if times is not None:
                times.waits(tag)
            return self._open(number, tag)

        def after(state: OpenPhase, batch: Any, args: Arguments, _kwargs: Keywords) -> None:
            self.loop.phase = state.outer
            if batch is not RAISED:
                self.marks.delivered(state.tag)
            size = amount(args[0]) if amount else 0
            end_ns = recorder.end(number, name, state.begin_ns, size, state.outer, state.tag)
            if times is not None:
                times.delivered(args[0], state.tag, state.begin_ns, end_ns)

        self._replace(owner, "__next__", Kind.INPUT, before, after)

    def _wrap_forward(self) -> None:
        """Record the outermost calls of modules, with what tells an evaluation from training."""
        recorder, name = self.recorder, self.recorder.intern("forward")
        layers = self.layers

        def before(args: Arguments, _kwargs: Keywords) -> OpenPhase | OpenLayer | None:
            if not args or not self.on_main_thread():
                return None
            module = args[0]
            if self.loop.phase == _FORWARD:
                return layers.timed.attempt(layers.open, module)
            flags = 0 if torch.is_grad_enabled() else WITHOUT_GRADIENTS
            if not module.training:
                flags |= EVALUATION_MODE
            self.loss_begin_ns = 0
            if self.loop.phase == IDLE:
                self.marks.before_forward()
            is_evaluation = flags == WITHOUT_GRADIENTS | EVALUATION_MODE
            tag = self.modules.number_of(module, same_as=_unwrapped(module))
            if layers.sampling:
                layers.timed.attempt(layers.enter_model, _unwrapped(module))
            return self._open(_EVALUATION if is_evaluation else _FORWARD, tag, flags)

        def after(state: OpenPhase | OpenLayer, *_: object) -> None:
            if isinstance(state, OpenLayer):
                layers.timed.attempt(layers.close, state)
                return
            begin_ns, outer, number, tag, flags = state
            self.loop.phase = outer
            end_ns = recorder.end(number, name, begin_ns, 0, outer, tag, flags)
            if outer == IDLE and torch.is_grad_enabled():
                self.loss_begin_ns = end_ns

        self._replace(
            *(torch.nn.Module, "__call__", Kind.FORWARD, before, after), passes_in=self.passed_on
        )

    def _wrap_backward(self) -> None:
        recorder, number = self.recorder, int(Kind.BACKWARD)
        backward_name, loss_name = recorder.intern("backward"), recorder.intern(LOSS)
        layers = self.layers

        def before(_args: Arguments, _kwargs: Keywords) -> OpenPhase | None:
            if not self.on_main_thread():
                return None
            for note in self.before_backward:
                note()
            self.in_flight.enter_backward()
            state = self._open(number)
            if self.loss_begin_ns:
                begin_ns, self.loss_begin_ns = self.loss_begin_ns, 0
                recorder.record(int(Kind.FORWARD), MAIN, loss_name, begin_ns, state.begin_ns)
            return state

        def after(state: OpenPhase, *_: object) -> None:
            self.loop.phase = state.outer
            recorder.end(number, backward_name, state.begin_ns, 0, state.outer)
            self.in_flight.leave_backward()
            layers.timed.attempt(layers.after_backward)
            if state.outer == IDLE:
                self.marks.after_backward()
            if self.stepped_in_backward:
                self.stepped_in_backward = False
                self.marks.by_optimizer(0)

        self._replace(torch.autograd, "backward", Kind.BACKWARD, before, after)

    def _replace(
        self,
        owner: Any,
        attribute: str,
        kind: Kind,
        before: Callable[[Arguments, Keywords], Any],
        after: Callable[[Any, Any, Arguments, Keywords], None],
        *,
        passes_in: AbstractSet[int] | None = None,
    ) -> None:
        hooked = around(
            *(getattr(owner, attribute), self.recorded(kind), before, after),
            loop=self.loop,
            passes_in=_part_of_phases(int(kind)) if passes_in is None else passes_in,
        )
        self.hooks.replace(owner, attribute, hooked)

    def _wrap_copy(self, attribute: str) -> None:
        """Record copies between devices; one within a device is not a copy in our sense."""
        recorder, name = self.recorder, self.recorder.intern(f"copy {attribute}")
        number = int(Kind.COPY)

        def before(_args: Arguments, _kwargs: Keywords) -> int:
            return monotonic_ns()

        def after(begin_ns: int, result: Any, args: Arguments, kwargs: Keywords) -> None:
            if result is RAISED:
                return
            source = args[0]
            if attribute == "copy_":
                # The parser's word is "other", the documentation's is "src".
                source = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("src"))
            device = getattr(source, "device", None)
            if device != result.device and threading.get_ident() == self.loop.main_thread:
                size = result.numel() * result.element_size()
                recorder.end(number, name, begin_ns, size, self.loop.phase)

        original = getattr(torch.Tensor, attribute)
        copied = around(
            *(original, self.recorded(Kind.COPY), before, after),
            loop=self.loop,
            passes_in=frozenset({int(Kind.COPY), int(Kind.INPUT)}),
        )
        self.hooks.replace(torch.Tensor, attribute, copied)


def _part_of_phases(number: int) -> frozenset[int]:
    """Return the phases within which a call is part of them, rather than a phase of its own.

    What a loader calls is input, and what is computed again inside backward is backward; but an
    optimizer may call a closure that runs the model.
    """
    apart = {IDLE} if number == _OPTIMIZER else {IDLE, _OPTIMIZER}
    return frozenset(map(int, Kind)) - apart


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that DDP, a compiled module and the like wrap; they keep it by a name."""
    while isinstance(parts := vars(module).get("_modules"), dict):
        inner = parts.get("_orig_mod", parts.get("module"))
        if inner is None:
            return module
        module = inner
    return module


def _saved_bytes(*args: object, **kwargs: object) -> int:
    """Return the size of the file that `torch.save(obj, f, ...)` wrote; 0 for a stream."""
    target = args[1] if len(args) > 1 else kwargs.get("f")
    try:
        return os.stat(target).st_size if isinstance(target, (str, os.PathLike)) else 0  # noqa: PTH116  # str or path
    except OSError:
        return 0
