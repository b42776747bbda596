"""Sees the phases of a training loop where a script meets torch, by replacing callables.

A wrapper takes whatever its original takes and passes it on as it came, so that every legal call
stays legal. It opens a phase only if it is the outermost one on the main thread.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_hooks import RecordedKind, around
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.format.events import IDLE, MAIN, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from paceline.native import Recorder
    from paceline.trace.collectors.torch_in_flight import InFlight, Loop

_OPTIMIZER = int(Kind.OPTIMIZER)


class PhaseRecorder:
    """The side of the torch collector that sees phases; used by the main thread alone."""

    def __init__(
        self,
        recorder: Recorder,
        loop: Loop,
        in_flight: InFlight,
        available: frozenset[Capability],
    ) -> None:
        self.recorder = recorder
        self.loop = loop
        self.in_flight = in_flight
        self.available = available
        self.kinds: dict[Kind, RecordedKind] = {}
        self.loss_begin_ns = 0  # end of the last training forward, when nothing came after it
        self.stepped_in_backward = False

    def install(self) -> None:
        """Put the hooks in place."""
        if Capability.LOADER_ITERATOR in self.available:
            self.wrap(internals.loader_iterator(), "__next__", Kind.INPUT, "next")
        self.wrap(DataLoader, "__iter__", Kind.INPUT, "iter")
        self.wrap(torch.optim.Optimizer, "zero_grad", Kind.OPTIMIZER, "zero_grad")
        self.wrap(torch.nn.Module, "zero_grad", Kind.OPTIMIZER, "zero_grad")
        self.wrap(torch.nn.utils, "clip_grad_norm_", Kind.OPTIMIZER, "clip_grad_norm")
        self.wrap(torch, "save", Kind.CHECKPOINT, "save", amount=_saved_bytes)
        self.wrap(torch.nn.Module, "__call__", Kind.FORWARD, "forward", after=self._await_loss)
        self._wrap_backward()
        for name in ("to", "cpu", "cuda", "copy_"):
            if hasattr(torch.Tensor, name):
                self._wrap_copy(name)

    def wrap_checkpoint(self, module: ModuleType) -> None:
        """See the checkpoints of `torch.distributed.checkpoint`."""
        for attribute in ("save", "async_save"):
            if hasattr(module, attribute):
                self.wrap(module, attribute, Kind.CHECKPOINT, f"checkpoint {attribute}")

    def wrap_loader(self, module: ModuleType) -> None:
        """Count waiting for the store's loader as input, and what it left out as a counter."""
        iterator, recorder = module.LoaderIterator, self.recorder
        skipped_name, skipped = recorder.intern("loader_skipped_samples"), 0

        def delivered(batches: Any) -> int:
            nonlocal skipped
            if batches.skipped_count != skipped:
                skipped, now_ns = batches.skipped_count, monotonic_ns()
                recorder.record(int(Kind.COUNTER), MAIN, skipped_name, now_ns, now_ns, skipped)
            return int(batches.delivered_bytes)

        self.wrap(iterator, "__next__", Kind.INPUT, "next", amount=delivered)
        self.wrap(module.Loader, "__iter__", Kind.INPUT, "iter")

    def opens(self, number: int) -> bool:
        """Return whether a call opens a phase, rather than being part of one that is open.

        What a loader calls is input, and what is computed again inside backward is backward; but
        an optimizer may call a closure that runs the model.
        """
        phase = self.loop.phase
        if phase != IDLE and (phase != _OPTIMIZER or number == _OPTIMIZER):
            return False
        return threading.get_ident() == self.loop.main_thread

    def _await_loss(self, end_ns: int) -> None:
        self.loss_begin_ns = end_ns if torch.is_grad_enabled() else 0

    def wrap(
        self,
        owner: Any,
        attribute: str,
        kind: Kind,
        label: str,
        *,
        amount: Callable[..., int] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Replace a callable by one that records its outermost calls on the main thread.

        Args:
            owner: class or module whose attribute it is.
            attribute: its name.
            kind: of event.
            label: name of the event.
            amount: from the call's arguments, the bytes that it moved.
            after: called with the end of a call that nothing encloses.
        """
        recorder, number, name = self.recorder, int(kind), self.recorder.intern(label)

        def before(*_args: Any, **_kwargs: Any) -> tuple[int, int] | None:
            if not self.opens(number):
                return None
            begin_ns = recorder.begin(number)
            outer, self.loop.phase = self.loop.phase, number
            self.loss_begin_ns = 0
            return begin_ns, outer

        def ended(state: tuple[int, int], _result: Any, *args: Any, **kwargs: Any) -> None:
            begin_ns, outer = state
            self.loop.phase = outer
            size = amount(*args, **kwargs) if amount else 0
            end_ns = recorder.end(number, name, begin_ns, size, outer)
            if after and outer == IDLE:
                after(end_ns)

        original = getattr(owner, attribute)
        setattr(owner, attribute, around(original, self.recorded(kind), before, ended))

    def recorded(self, kind: Kind) -> RecordedKind:
        """Return whether phases of a kind are recorded: all their hooks share it."""
        if kind not in self.kinds:
            lost = f"the phase {kind.name.lower()} (its time counts as other)"
            self.kinds[kind] = RecordedKind(lost, kind)
        return self.kinds[kind]

    def _wrap_backward(self) -> None:
        recorder, number = self.recorder, int(Kind.BACKWARD)
        backward_name, loss_name = recorder.intern("backward"), recorder.intern("loss")

        def before(*_args: Any, **_kwargs: Any) -> tuple[int, int] | None:
            if not self.opens(number):
                return None
            begin_ns = recorder.begin(number)
            if self.loss_begin_ns:
                recorder.record(int(Kind.FORWARD), MAIN, loss_name, self.loss_begin_ns, begin_ns)
                self.loss_begin_ns = 0
            self.in_flight.enter_backward()
            outer, self.loop.phase = self.loop.phase, number
            return begin_ns, outer

        def after(state: tuple[int, int], *_args: Any, **_kwargs: Any) -> None:
            begin_ns, outer = state
            self.loop.phase = outer
            recorder.end(number, backward_name, begin_ns, 0, outer)
            self.in_flight.leave_backward()
            if self.stepped_in_backward:
                self.stepped_in_backward = False
                recorder.end_step()

        kind = self.recorded(Kind.BACKWARD)
        torch.autograd.backward = around(torch.autograd.backward, kind, before, after)

    def _wrap_copy(self, attribute: str) -> None:
        """Record copies between devices; one within a device is not a copy in our sense."""
        recorder, name = self.recorder, self.recorder.intern(f"copy {attribute}")
        number, passive = int(Kind.COPY), (int(Kind.COPY), int(Kind.INPUT))

        def before(*_args: Any, **_kwargs: Any) -> int | None:
            return None if self.loop.phase in passive else monotonic_ns()

        def after(begin_ns: int, result: Any, source: Any, *args: Any, **kwargs: Any) -> None:
            if result is None:  # it raised
                return
            if attribute == "copy_":
                # The parser's word is "other", the documentation's is "src".
                source = args[0] if args else kwargs.get("other", kwargs.get("src"))
            device = getattr(source, "device", None)
            if device != result.device and threading.get_ident() == self.loop.main_thread:
                size = result.numel() * result.element_size()
                recorder.end(number, name, begin_ns, size, self.loop.phase)

        original = getattr(torch.Tensor, attribute)
        setattr(torch.Tensor, attribute, around(original, self.recorded(Kind.COPY), before, after))


def _saved_bytes(*args: object, **kwargs: object) -> int:
    """Return the size of the file that `torch.save(obj, f, ...)` wrote; 0 for a stream."""
    target = args[1] if len(args) > 1 else kwargs.get("f")
    try:
        return os.stat(target).st_size if isinstance(target, (str, os.PathLike)) else 0  # noqa: PTH116  # str or path
    except OSError:
        return 0
